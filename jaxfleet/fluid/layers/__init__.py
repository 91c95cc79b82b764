"""Layers: functions that add operators to the program that is being built."""

import inspect
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import NoReturn as _NoReturn

from jaxfleet.fluid.layers.control_flow import Switch as Switch
from jaxfleet.fluid.layers.control_flow import (
    autoincreased_step_counter as autoincreased_step_counter,
)
from jaxfleet.fluid.layers.control_flow import case as case
from jaxfleet.fluid.layers.control_flow import cond as cond
from jaxfleet.fluid.layers.control_flow import increment as increment
from jaxfleet.fluid.layers.control_flow import switch_case as switch_case
from jaxfleet.fluid.layers.convolution import adaptive_pool2d as adaptive_pool2d
from jaxfleet.fluid.layers.convolution import conv2d as conv2d
from jaxfleet.fluid.layers.convolution import conv2d_transpose as conv2d_transpose
from jaxfleet.fluid.layers.convolution import conv3d as conv3d
from jaxfleet.fluid.layers.convolution import image_resize as image_resize
from jaxfleet.fluid.layers.convolution import image_resize_short as image_resize_short
from jaxfleet.fluid.layers.convolution import pool2d as pool2d
from jaxfleet.fluid.layers.convolution import pool3d as pool3d
from jaxfleet.fluid.layers.convolution import resize_bilinear as resize_bilinear
from jaxfleet.fluid.layers.convolution import resize_nearest as resize_nearest
from jaxfleet.fluid.layers.convolution import resize_trilinear as resize_trilinear
from jaxfleet.fluid.layers.if_else import IfElse as IfElse
from jaxfleet.fluid.layers.io import Print as Print
from jaxfleet.fluid.layers.io import _pull_box_sparse as _pull_box_sparse
from jaxfleet.fluid.layers.io import create_py_reader_by_data as create_py_reader_by_data
from jaxfleet.fluid.layers.io import double_buffer as double_buffer
from jaxfleet.fluid.layers.io import py_func as py_func
from jaxfleet.fluid.layers.io import py_reader as py_reader
from jaxfleet.fluid.layers.io import read_file as read_file
from jaxfleet.fluid.layers.layer_function import checked as _checked
from jaxfleet.fluid.layers.loops import While as While
from jaxfleet.fluid.layers.loops import while_loop as while_loop
from jaxfleet.fluid.layers.losses import accuracy as accuracy
from jaxfleet.fluid.layers.losses import auc as auc
from jaxfleet.fluid.layers.losses import cross_entropy as cross_entropy
from jaxfleet.fluid.layers.losses import hsigmoid as hsigmoid
from jaxfleet.fluid.layers.losses import huber_loss as huber_loss
from jaxfleet.fluid.layers.losses import label_smooth as label_smooth
from jaxfleet.fluid.layers.losses import log_loss as log_loss
from jaxfleet.fluid.layers.losses import mse_loss as mse_loss
from jaxfleet.fluid.layers.losses import nce as nce
from jaxfleet.fluid.layers.losses import (
    sampled_softmax_with_cross_entropy as sampled_softmax_with_cross_entropy,
)
from jaxfleet.fluid.layers.losses import (
    sigmoid_cross_entropy_with_logits as sigmoid_cross_entropy_with_logits,
)
from jaxfleet.fluid.layers.losses import softmax_with_cross_entropy as softmax_with_cross_entropy
from jaxfleet.fluid.layers.losses import square_error_cost as square_error_cost
from jaxfleet.fluid.layers.manipulation import argmax as argmax
from jaxfleet.fluid.layers.manipulation import argmin as argmin
from jaxfleet.fluid.layers.manipulation import argsort as argsort
from jaxfleet.fluid.layers.manipulation import concat as concat
from jaxfleet.fluid.layers.manipulation import expand as expand
from jaxfleet.fluid.layers.manipulation import flatten as flatten
from jaxfleet.fluid.layers.manipulation import gather as gather
from jaxfleet.fluid.layers.manipulation import gather_nd as gather_nd
from jaxfleet.fluid.layers.manipulation import one_hot as one_hot
from jaxfleet.fluid.layers.manipulation import pad as pad
from jaxfleet.fluid.layers.manipulation import reshape as reshape
from jaxfleet.fluid.layers.manipulation import reverse as reverse
from jaxfleet.fluid.layers.manipulation import scatter as scatter
from jaxfleet.fluid.layers.manipulation import shape as shape
from jaxfleet.fluid.layers.manipulation import slice as slice
from jaxfleet.fluid.layers.manipulation import split as split
from jaxfleet.fluid.layers.manipulation import squeeze as squeeze
from jaxfleet.fluid.layers.manipulation import stack as stack
from jaxfleet.fluid.layers.manipulation import strided_slice as strided_slice
from jaxfleet.fluid.layers.manipulation import topk as topk
from jaxfleet.fluid.layers.manipulation import transpose as transpose
from jaxfleet.fluid.layers.manipulation import unsqueeze as unsqueeze
from jaxfleet.fluid.layers.manipulation import unstack as unstack
from jaxfleet.fluid.layers.math_ops import abs as abs
from jaxfleet.fluid.layers.math_ops import acos as acos
from jaxfleet.fluid.layers.math_ops import asin as asin
from jaxfleet.fluid.layers.math_ops import atan as atan
from jaxfleet.fluid.layers.math_ops import brelu as brelu
from jaxfleet.fluid.layers.math_ops import ceil as ceil
from jaxfleet.fluid.layers.math_ops import clip as clip
from jaxfleet.fluid.layers.math_ops import clip_by_norm as clip_by_norm
from jaxfleet.fluid.layers.math_ops import cos as cos
from jaxfleet.fluid.layers.math_ops import cos_sim as cos_sim
from jaxfleet.fluid.layers.math_ops import cosh as cosh
from jaxfleet.fluid.layers.math_ops import cumsum as cumsum
from jaxfleet.fluid.layers.math_ops import elementwise_add as elementwise_add
from jaxfleet.fluid.layers.math_ops import elementwise_div as elementwise_div
from jaxfleet.fluid.layers.math_ops import elementwise_floordiv as elementwise_floordiv
from jaxfleet.fluid.layers.math_ops import elementwise_max as elementwise_max
from jaxfleet.fluid.layers.math_ops import elementwise_min as elementwise_min
from jaxfleet.fluid.layers.math_ops import elementwise_mod as elementwise_mod
from jaxfleet.fluid.layers.math_ops import elementwise_mul as elementwise_mul
from jaxfleet.fluid.layers.math_ops import elementwise_pow as elementwise_pow
from jaxfleet.fluid.layers.math_ops import elementwise_sub as elementwise_sub
from jaxfleet.fluid.layers.math_ops import elu as elu
from jaxfleet.fluid.layers.math_ops import equal as equal
from jaxfleet.fluid.layers.math_ops import erf as erf
from jaxfleet.fluid.layers.math_ops import exp as exp
from jaxfleet.fluid.layers.math_ops import floor as floor
from jaxfleet.fluid.layers.math_ops import gelu as gelu
from jaxfleet.fluid.layers.math_ops import greater_equal as greater_equal
from jaxfleet.fluid.layers.math_ops import greater_than as greater_than
from jaxfleet.fluid.layers.math_ops import hard_shrink as hard_shrink
from jaxfleet.fluid.layers.math_ops import hard_sigmoid as hard_sigmoid
from jaxfleet.fluid.layers.math_ops import hard_swish as hard_swish
from jaxfleet.fluid.layers.math_ops import is_empty as is_empty
from jaxfleet.fluid.layers.math_ops import l2_normalize as l2_normalize
from jaxfleet.fluid.layers.math_ops import leaky_relu as leaky_relu
from jaxfleet.fluid.layers.math_ops import less_equal as less_equal
from jaxfleet.fluid.layers.math_ops import less_than as less_than
from jaxfleet.fluid.layers.math_ops import log as log
from jaxfleet.fluid.layers.math_ops import logical_and as logical_and
from jaxfleet.fluid.layers.math_ops import logical_not as logical_not
from jaxfleet.fluid.layers.math_ops import logical_or as logical_or
from jaxfleet.fluid.layers.math_ops import logical_xor as logical_xor
from jaxfleet.fluid.layers.math_ops import logsigmoid as logsigmoid
from jaxfleet.fluid.layers.math_ops import matmul as matmul
from jaxfleet.fluid.layers.math_ops import mean as mean
from jaxfleet.fluid.layers.math_ops import mul as mul
from jaxfleet.fluid.layers.math_ops import not_equal as not_equal
from jaxfleet.fluid.layers.math_ops import pow as pow
from jaxfleet.fluid.layers.math_ops import reciprocal as reciprocal
from jaxfleet.fluid.layers.math_ops import reduce_all as reduce_all
from jaxfleet.fluid.layers.math_ops import reduce_any as reduce_any
from jaxfleet.fluid.layers.math_ops import reduce_max as reduce_max
from jaxfleet.fluid.layers.math_ops import reduce_mean as reduce_mean
from jaxfleet.fluid.layers.math_ops import reduce_min as reduce_min
from jaxfleet.fluid.layers.math_ops import reduce_prod as reduce_prod
from jaxfleet.fluid.layers.math_ops import reduce_sum as reduce_sum
from jaxfleet.fluid.layers.math_ops import relu as relu
from jaxfleet.fluid.layers.math_ops import relu6 as relu6
from jaxfleet.fluid.layers.math_ops import round as round
from jaxfleet.fluid.layers.math_ops import rsqrt as rsqrt
from jaxfleet.fluid.layers.math_ops import scale as scale
from jaxfleet.fluid.layers.math_ops import selu as selu
from jaxfleet.fluid.layers.math_ops import sigmoid as sigmoid
from jaxfleet.fluid.layers.math_ops import sign as sign
from jaxfleet.fluid.layers.math_ops import sin as sin
from jaxfleet.fluid.layers.math_ops import sinh as sinh
from jaxfleet.fluid.layers.math_ops import soft_relu as soft_relu
from jaxfleet.fluid.layers.math_ops import softmax as softmax
from jaxfleet.fluid.layers.math_ops import softplus as softplus
from jaxfleet.fluid.layers.math_ops import softshrink as softshrink
from jaxfleet.fluid.layers.math_ops import softsign as softsign
from jaxfleet.fluid.layers.math_ops import sqrt as sqrt
from jaxfleet.fluid.layers.math_ops import square as square
from jaxfleet.fluid.layers.math_ops import stanh as stanh
from jaxfleet.fluid.layers.math_ops import sum as sum
from jaxfleet.fluid.layers.math_ops import sums as sums
from jaxfleet.fluid.layers.math_ops import swish as swish
from jaxfleet.fluid.layers.math_ops import tanh as tanh
from jaxfleet.fluid.layers.math_ops import tanh_shrink as tanh_shrink
from jaxfleet.fluid.layers.math_ops import thresholded_relu as thresholded_relu
from jaxfleet.fluid.layers.nn import dropout as dropout
from jaxfleet.fluid.layers.nn import embedding as embedding
from jaxfleet.fluid.layers.nn import fc as fc
from jaxfleet.fluid.layers.normalization import batch_norm as batch_norm
from jaxfleet.fluid.layers.normalization import data_norm as data_norm
from jaxfleet.fluid.layers.normalization import group_norm as group_norm
from jaxfleet.fluid.layers.normalization import layer_norm as layer_norm
from jaxfleet.fluid.layers.rank_tables import (
    reorder_lod_tensor_by_rank as reorder_lod_tensor_by_rank,
)
from jaxfleet.fluid.layers.recurrent import crf_decoding as crf_decoding
from jaxfleet.fluid.layers.recurrent import dynamic_gru as dynamic_gru
from jaxfleet.fluid.layers.recurrent import dynamic_lstm as dynamic_lstm
from jaxfleet.fluid.layers.recurrent import edit_distance as edit_distance
from jaxfleet.fluid.layers.recurrent import linear_chain_crf as linear_chain_crf
from jaxfleet.fluid.layers.recurrent import warpctc as warpctc
from jaxfleet.fluid.layers.rnn import DynamicRNN as DynamicRNN
from jaxfleet.fluid.layers.rnn import StaticRNN as StaticRNN
from jaxfleet.fluid.layers.schedules import cosine_decay as cosine_decay
from jaxfleet.fluid.layers.schedules import exponential_decay as exponential_decay
from jaxfleet.fluid.layers.schedules import inverse_time_decay as inverse_time_decay
from jaxfleet.fluid.layers.schedules import linear_lr_warmup as linear_lr_warmup
from jaxfleet.fluid.layers.schedules import natural_exp_decay as natural_exp_decay
from jaxfleet.fluid.layers.schedules import noam_decay as noam_decay
from jaxfleet.fluid.layers.schedules import piecewise_decay as piecewise_decay
from jaxfleet.fluid.layers.schedules import polynomial_decay as polynomial_decay
from jaxfleet.fluid.layers.sequences import lod_reset as lod_reset
from jaxfleet.fluid.layers.sequences import sequence_concat as sequence_concat
from jaxfleet.fluid.layers.sequences import sequence_conv as sequence_conv
from jaxfleet.fluid.layers.sequences import sequence_expand as sequence_expand
from jaxfleet.fluid.layers.sequences import sequence_first_step as sequence_first_step
from jaxfleet.fluid.layers.sequences import sequence_last_step as sequence_last_step
from jaxfleet.fluid.layers.sequences import sequence_pad as sequence_pad
from jaxfleet.fluid.layers.sequences import sequence_pool as sequence_pool
from jaxfleet.fluid.layers.sequences import sequence_reshape as sequence_reshape
from jaxfleet.fluid.layers.sequences import sequence_slice as sequence_slice
from jaxfleet.fluid.layers.sequences import sequence_softmax as sequence_softmax
from jaxfleet.fluid.layers.sequences import sequence_unpad as sequence_unpad
from jaxfleet.fluid.layers.tensor import assign as assign
from jaxfleet.fluid.layers.tensor import cast as cast
from jaxfleet.fluid.layers.tensor import create_global_var as create_global_var
from jaxfleet.fluid.layers.tensor import create_parameter as create_parameter
from jaxfleet.fluid.layers.tensor import create_tensor as create_tensor
from jaxfleet.fluid.layers.tensor import data as data
from jaxfleet.fluid.layers.tensor import fill_constant as fill_constant
from jaxfleet.fluid.layers.tensor import (
    fill_constant_batch_size_like as fill_constant_batch_size_like,
)
from jaxfleet.fluid.layers.tensor import gaussian_random as gaussian_random
from jaxfleet.fluid.layers.tensor import ones as ones
from jaxfleet.fluid.layers.tensor import ones_like as ones_like
from jaxfleet.fluid.layers.tensor import uniform_random as uniform_random
from jaxfleet.fluid.layers.tensor import zeros as zeros
from jaxfleet.fluid.layers.tensor import zeros_like as zeros_like
from jaxfleet.fluid.layers.tensor_arrays import array_length as array_length
from jaxfleet.fluid.layers.tensor_arrays import array_read as array_read
from jaxfleet.fluid.layers.tensor_arrays import array_write as array_write
from jaxfleet.fluid.layers.tensor_arrays import beam_search as beam_search
from jaxfleet.fluid.layers.tensor_arrays import beam_search_decode as beam_search_decode
from jaxfleet.fluid.layers.tensor_arrays import create_array as create_array

# Public layers check their arguments, and report the calling line with the invalid one.
for _name, _layer in list(globals().items()):
    if inspect.isfunction(_layer) and not _name.startswith("_"):
        globals()[_name] = _checked(_layer)

if not _TYPE_CHECKING:  # to which every name would be a layer

    def __getattr__(name: str) -> _NoReturn:
        what = f"module {__name__!r} has no attribute {name!r}"
        if not name.startswith("_"):
            what += "; docs/fluid-differences.md lists the layers that are missing"
        raise AttributeError(what, name=name)
