"""Layers: functions that add operators to the program that is being built."""

import inspect

from jaxfleet.fluid.layers.activations import abs as abs
from jaxfleet.fluid.layers.activations import acos as acos
from jaxfleet.fluid.layers.activations import asin as asin
from jaxfleet.fluid.layers.activations import atan as atan
from jaxfleet.fluid.layers.activations import brelu as brelu
from jaxfleet.fluid.layers.activations import ceil as ceil
from jaxfleet.fluid.layers.activations import cos as cos
from jaxfleet.fluid.layers.activations import cosh as cosh
from jaxfleet.fluid.layers.activations import elu as elu
from jaxfleet.fluid.layers.activations import erf as erf
from jaxfleet.fluid.layers.activations import exp as exp
from jaxfleet.fluid.layers.activations import floor as floor
from jaxfleet.fluid.layers.activations import gelu as gelu
from jaxfleet.fluid.layers.activations import hard_shrink as hard_shrink
from jaxfleet.fluid.layers.activations import hard_sigmoid as hard_sigmoid
from jaxfleet.fluid.layers.activations import hard_swish as hard_swish
from jaxfleet.fluid.layers.activations import leaky_relu as leaky_relu
from jaxfleet.fluid.layers.activations import log as log
from jaxfleet.fluid.layers.activations import logsigmoid as logsigmoid
from jaxfleet.fluid.layers.activations import pow as pow
from jaxfleet.fluid.layers.activations import reciprocal as reciprocal
from jaxfleet.fluid.layers.activations import relu as relu
from jaxfleet.fluid.layers.activations import relu6 as relu6
from jaxfleet.fluid.layers.activations import round as round
from jaxfleet.fluid.layers.activations import rsqrt as rsqrt
from jaxfleet.fluid.layers.activations import selu as selu
from jaxfleet.fluid.layers.activations import sigmoid as sigmoid
from jaxfleet.fluid.layers.activations import sign as sign
from jaxfleet.fluid.layers.activations import sin as sin
from jaxfleet.fluid.layers.activations import sinh as sinh
from jaxfleet.fluid.layers.activations import soft_relu as soft_relu
from jaxfleet.fluid.layers.activations import softmax as softmax
from jaxfleet.fluid.layers.activations import softplus as softplus
from jaxfleet.fluid.layers.activations import softshrink as softshrink
from jaxfleet.fluid.layers.activations import softsign as softsign
from jaxfleet.fluid.layers.activations import sqrt as sqrt
from jaxfleet.fluid.layers.activations import square as square
from jaxfleet.fluid.layers.activations import stanh as stanh
from jaxfleet.fluid.layers.activations import swish as swish
from jaxfleet.fluid.layers.activations import tanh as tanh
from jaxfleet.fluid.layers.activations import tanh_shrink as tanh_shrink
from jaxfleet.fluid.layers.activations import thresholded_relu as thresholded_relu
from jaxfleet.fluid.layers.alignment import edit_distance as edit_distance
from jaxfleet.fluid.layers.alignment import warpctc as warpctc
from jaxfleet.fluid.layers.arguments import checked as _checked
from jaxfleet.fluid.layers.branches import case as case
from jaxfleet.fluid.layers.branches import cond as cond
from jaxfleet.fluid.layers.branches import switch_case as switch_case
from jaxfleet.fluid.layers.comparisons import equal as equal
from jaxfleet.fluid.layers.comparisons import greater_equal as greater_equal
from jaxfleet.fluid.layers.comparisons import greater_than as greater_than
from jaxfleet.fluid.layers.comparisons import is_empty as is_empty
from jaxfleet.fluid.layers.comparisons import less_equal as less_equal
from jaxfleet.fluid.layers.comparisons import less_than as less_than
from jaxfleet.fluid.layers.comparisons import logical_and as logical_and
from jaxfleet.fluid.layers.comparisons import logical_not as logical_not
from jaxfleet.fluid.layers.comparisons import logical_or as logical_or
from jaxfleet.fluid.layers.comparisons import logical_xor as logical_xor
from jaxfleet.fluid.layers.comparisons import not_equal as not_equal
from jaxfleet.fluid.layers.control_flow import Switch as Switch
from jaxfleet.fluid.layers.control_flow import (
    autoincreased_step_counter as autoincreased_step_counter,
)
from jaxfleet.fluid.layers.control_flow import increment as increment
from jaxfleet.fluid.layers.data_norm import data_norm as data_norm
from jaxfleet.fluid.layers.dynamic_rnn import DynamicRNN as DynamicRNN
from jaxfleet.fluid.layers.host_functions import Print as Print
from jaxfleet.fluid.layers.host_functions import py_func as py_func
from jaxfleet.fluid.layers.if_else import IfElse as IfElse
from jaxfleet.fluid.layers.images import adaptive_pool2d as adaptive_pool2d
from jaxfleet.fluid.layers.images import conv2d as conv2d
from jaxfleet.fluid.layers.images import conv2d_transpose as conv2d_transpose
from jaxfleet.fluid.layers.images import pool2d as pool2d
from jaxfleet.fluid.layers.indexing import argmax as argmax
from jaxfleet.fluid.layers.indexing import argmin as argmin
from jaxfleet.fluid.layers.indexing import argsort as argsort
from jaxfleet.fluid.layers.indexing import gather as gather
from jaxfleet.fluid.layers.indexing import gather_nd as gather_nd
from jaxfleet.fluid.layers.indexing import one_hot as one_hot
from jaxfleet.fluid.layers.indexing import scatter as scatter
from jaxfleet.fluid.layers.indexing import shape as shape
from jaxfleet.fluid.layers.indexing import slice as slice
from jaxfleet.fluid.layers.indexing import strided_slice as strided_slice
from jaxfleet.fluid.layers.indexing import topk as topk
from jaxfleet.fluid.layers.io import create_py_reader_by_data as create_py_reader_by_data
from jaxfleet.fluid.layers.io import double_buffer as double_buffer
from jaxfleet.fluid.layers.io import py_reader as py_reader
from jaxfleet.fluid.layers.io import read_file as read_file
from jaxfleet.fluid.layers.loops import While as While
from jaxfleet.fluid.layers.loops import while_loop as while_loop
from jaxfleet.fluid.layers.losses import cross_entropy as cross_entropy
from jaxfleet.fluid.layers.losses import huber_loss as huber_loss
from jaxfleet.fluid.layers.losses import label_smooth as label_smooth
from jaxfleet.fluid.layers.losses import log_loss as log_loss
from jaxfleet.fluid.layers.losses import mse_loss as mse_loss
from jaxfleet.fluid.layers.losses import (
    sigmoid_cross_entropy_with_logits as sigmoid_cross_entropy_with_logits,
)
from jaxfleet.fluid.layers.losses import softmax_with_cross_entropy as softmax_with_cross_entropy
from jaxfleet.fluid.layers.losses import square_error_cost as square_error_cost
from jaxfleet.fluid.layers.many_classes import hsigmoid as hsigmoid
from jaxfleet.fluid.layers.many_classes import nce as nce
from jaxfleet.fluid.layers.many_classes import (
    sampled_softmax_with_cross_entropy as sampled_softmax_with_cross_entropy,
)
from jaxfleet.fluid.layers.maths import clip as clip
from jaxfleet.fluid.layers.maths import clip_by_norm as clip_by_norm
from jaxfleet.fluid.layers.maths import cos_sim as cos_sim
from jaxfleet.fluid.layers.maths import cumsum as cumsum
from jaxfleet.fluid.layers.maths import elementwise_add as elementwise_add
from jaxfleet.fluid.layers.maths import elementwise_div as elementwise_div
from jaxfleet.fluid.layers.maths import elementwise_floordiv as elementwise_floordiv
from jaxfleet.fluid.layers.maths import elementwise_max as elementwise_max
from jaxfleet.fluid.layers.maths import elementwise_min as elementwise_min
from jaxfleet.fluid.layers.maths import elementwise_mod as elementwise_mod
from jaxfleet.fluid.layers.maths import elementwise_mul as elementwise_mul
from jaxfleet.fluid.layers.maths import elementwise_pow as elementwise_pow
from jaxfleet.fluid.layers.maths import elementwise_sub as elementwise_sub
from jaxfleet.fluid.layers.maths import l2_normalize as l2_normalize
from jaxfleet.fluid.layers.maths import matmul as matmul
from jaxfleet.fluid.layers.maths import mean as mean
from jaxfleet.fluid.layers.maths import mul as mul
from jaxfleet.fluid.layers.maths import reduce_all as reduce_all
from jaxfleet.fluid.layers.maths import reduce_any as reduce_any
from jaxfleet.fluid.layers.maths import reduce_max as reduce_max
from jaxfleet.fluid.layers.maths import reduce_mean as reduce_mean
from jaxfleet.fluid.layers.maths import reduce_min as reduce_min
from jaxfleet.fluid.layers.maths import reduce_prod as reduce_prod
from jaxfleet.fluid.layers.maths import reduce_sum as reduce_sum
from jaxfleet.fluid.layers.maths import scale as scale
from jaxfleet.fluid.layers.maths import sum as sum
from jaxfleet.fluid.layers.maths import sums as sums
from jaxfleet.fluid.layers.metrics import accuracy as accuracy
from jaxfleet.fluid.layers.metrics import auc as auc
from jaxfleet.fluid.layers.networks import dropout as dropout
from jaxfleet.fluid.layers.networks import embedding as embedding
from jaxfleet.fluid.layers.networks import fc as fc
from jaxfleet.fluid.layers.normalization import batch_norm as batch_norm
from jaxfleet.fluid.layers.normalization import group_norm as group_norm
from jaxfleet.fluid.layers.normalization import layer_norm as layer_norm
from jaxfleet.fluid.layers.recurrent import crf_decoding as crf_decoding
from jaxfleet.fluid.layers.recurrent import dynamic_gru as dynamic_gru
from jaxfleet.fluid.layers.recurrent import dynamic_lstm as dynamic_lstm
from jaxfleet.fluid.layers.recurrent import linear_chain_crf as linear_chain_crf
from jaxfleet.fluid.layers.refused import _pull_box_sparse as _pull_box_sparse
from jaxfleet.fluid.layers.refused import beam_search as beam_search
from jaxfleet.fluid.layers.refused import beam_search_decode as beam_search_decode
from jaxfleet.fluid.layers.resizing import image_resize as image_resize
from jaxfleet.fluid.layers.resizing import image_resize_short as image_resize_short
from jaxfleet.fluid.layers.resizing import resize_bilinear as resize_bilinear
from jaxfleet.fluid.layers.resizing import resize_nearest as resize_nearest
from jaxfleet.fluid.layers.resizing import resize_trilinear as resize_trilinear
from jaxfleet.fluid.layers.schedules import cosine_decay as cosine_decay
from jaxfleet.fluid.layers.schedules import exponential_decay as exponential_decay
from jaxfleet.fluid.layers.schedules import inverse_time_decay as inverse_time_decay
from jaxfleet.fluid.layers.schedules import linear_lr_warmup as linear_lr_warmup
from jaxfleet.fluid.layers.schedules import natural_exp_decay as natural_exp_decay
from jaxfleet.fluid.layers.schedules import noam_decay as noam_decay
from jaxfleet.fluid.layers.schedules import piecewise_decay as piecewise_decay
from jaxfleet.fluid.layers.schedules import polynomial_decay as polynomial_decay
from jaxfleet.fluid.layers.sequence_shapes import sequence_concat as sequence_concat
from jaxfleet.fluid.layers.sequence_shapes import sequence_pad as sequence_pad
from jaxfleet.fluid.layers.sequence_shapes import sequence_reshape as sequence_reshape
from jaxfleet.fluid.layers.sequence_shapes import sequence_slice as sequence_slice
from jaxfleet.fluid.layers.sequence_shapes import sequence_unpad as sequence_unpad
from jaxfleet.fluid.layers.sequences import sequence_conv as sequence_conv
from jaxfleet.fluid.layers.sequences import sequence_expand as sequence_expand
from jaxfleet.fluid.layers.sequences import sequence_first_step as sequence_first_step
from jaxfleet.fluid.layers.sequences import sequence_last_step as sequence_last_step
from jaxfleet.fluid.layers.sequences import sequence_pool as sequence_pool
from jaxfleet.fluid.layers.sequences import sequence_softmax as sequence_softmax
from jaxfleet.fluid.layers.shapes import concat as concat
from jaxfleet.fluid.layers.shapes import expand as expand
from jaxfleet.fluid.layers.shapes import flatten as flatten
from jaxfleet.fluid.layers.shapes import pad as pad
from jaxfleet.fluid.layers.shapes import reshape as reshape
from jaxfleet.fluid.layers.shapes import reverse as reverse
from jaxfleet.fluid.layers.shapes import split as split
from jaxfleet.fluid.layers.shapes import squeeze as squeeze
from jaxfleet.fluid.layers.shapes import stack as stack
from jaxfleet.fluid.layers.shapes import transpose as transpose
from jaxfleet.fluid.layers.shapes import unsqueeze as unsqueeze
from jaxfleet.fluid.layers.shapes import unstack as unstack
from jaxfleet.fluid.layers.static_rnn import StaticRNN as StaticRNN
from jaxfleet.fluid.layers.tensor_arrays import array_length as array_length
from jaxfleet.fluid.layers.tensor_arrays import array_read as array_read
from jaxfleet.fluid.layers.tensor_arrays import array_write as array_write
from jaxfleet.fluid.layers.tensor_arrays import create_array as create_array
from jaxfleet.fluid.layers.tensors import assign as assign
from jaxfleet.fluid.layers.tensors import cast as cast
from jaxfleet.fluid.layers.tensors import create_global_var as create_global_var
from jaxfleet.fluid.layers.tensors import create_parameter as create_parameter
from jaxfleet.fluid.layers.tensors import create_tensor as create_tensor
from jaxfleet.fluid.layers.tensors import data as data
from jaxfleet.fluid.layers.tensors import fill_constant as fill_constant
from jaxfleet.fluid.layers.tensors import (
    fill_constant_batch_size_like as fill_constant_batch_size_like,
)
from jaxfleet.fluid.layers.tensors import gaussian_random as gaussian_random
from jaxfleet.fluid.layers.tensors import ones as ones
from jaxfleet.fluid.layers.tensors import ones_like as ones_like
from jaxfleet.fluid.layers.tensors import uniform_random as uniform_random
from jaxfleet.fluid.layers.tensors import zeros as zeros
from jaxfleet.fluid.layers.tensors import zeros_like as zeros_like
from jaxfleet.fluid.layers.volumes import conv3d as conv3d
from jaxfleet.fluid.layers.volumes import pool3d as pool3d

# Whoever calls a layer by its public name is told which of the arguments is wrong, and where.
for _name, _layer in list(globals().items()):
    if inspect.isfunction(_layer) and not _name.startswith("_"):
        globals()[_name] = _checked(_layer)
