"""The formulas of fluid 1.8.5's kernels in numpy, for the tests of optimizers.

Each takes a parameter's value, its gradient and the state of the steps before (a dict that is empty
at first), and returns the next value. All is in 32 bits, attributes too, as in fluid.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

Array = Any
Kernel = Callable[[Array, Array, dict[str, Any]], Array]
_ONE = np.float32(1)


def _f32(*values: float) -> tuple[Any, ...]:
    return tuple(np.float32(x) for x in values)


def _zeros(state: dict[str, Any], name: str, like: Array, begin: float = 0.0) -> Array:
    return state.get(name, np.full_like(like, begin))


def sgd(rate: float) -> Kernel:
    (lr,) = _f32(rate)
    return lambda w, g, _: w - lr * g


def momentum(rate: float, mu: float, nesterov: bool = False) -> Kernel:
    lr, mu = _f32(rate, mu)

    def step(w: Array, g: Array, state: dict[str, Any]) -> Array:
        state["v"] = v = mu * _zeros(state, "v", w) + g
        return w - (g + mu * v) * lr if nesterov else w - lr * v

    return step


def lars(rate: float, mu: float, coeff: float = 0.001, decay: float = 0.0005) -> Kernel:
    lr, mu, coeff, decay = _f32(rate, mu, coeff, decay)

    def step(w: Array, g: Array, state: dict[str, Any]) -> Array:
        w_norm, g_norm = np.sqrt(np.sum(w * w)), np.sqrt(np.sum(g * g))
        local = lr
        if w_norm > 0 and g_norm > 0:
            local = lr * coeff * w_norm / (g_norm + decay * w_norm)
        state["v"] = mu * _zeros(state, "v", w) + local * (g + decay * w)
        return w - state["v"]

    return step


def adagrad(rate: float, epsilon: float = 1e-6, begin: float = 0.0) -> Kernel:
    lr, epsilon = _f32(rate, epsilon)

    def step(w: Array, g: Array, state: dict[str, Any]) -> Array:
        state["m"] = _zeros(state, "m", w, begin) + g * g
        return w - lr * g / (np.sqrt(state["m"]) + epsilon)

    return step


def decayed_adagrad(rate: float, decay: float = 0.95, epsilon: float = 1e-6) -> Kernel:
    lr, decay, epsilon = _f32(rate, decay, epsilon)

    def step(w: Array, g: Array, state: dict[str, Any]) -> Array:
        state["m"] = decay * _zeros(state, "m", w) + (_ONE - decay) * g * g
        return w - lr * g / (np.sqrt(state["m"]) + epsilon)

    return step


def adadelta(epsilon: float = 1e-6, rho: float = 0.95, *, evaluated_twice: bool = False) -> Kernel:
    """With `evaluated_twice`, as in 1.8.5: the step reads state that its update has overwritten."""
    epsilon, rho = _f32(epsilon, rho)

    def step(w: Array, g: Array, state: dict[str, Any]) -> Array:
        state["g2"] = rho * _zeros(state, "g2", w) + (_ONE - rho) * g * g
        before = _zeros(state, "u2", w)
        update = np.sqrt((before + epsilon) / (state["g2"] + epsilon)) * g
        state["u2"] = rho * before + (_ONE - rho) * update * update
        if evaluated_twice:
            update = np.sqrt((state["u2"] + epsilon) / (state["g2"] + epsilon)) * g
        return w - update

    return step


def adam(
    rate: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
    *,
    is_lazy: bool = False,
    powers: tuple[float, float] | None = None,
    are_powers_ahead: bool = False,
) -> Kernel:
    """`are_powers_ahead`: as in 1.8.5 for gradients of rows, whose powers are a step ahead."""
    lr, beta1, beta2, epsilon = _f32(rate, beta1, beta2, epsilon)
    begun = _f32(*powers) if powers else (beta1, beta2)

    def step(w: Array, g: Array, state: dict[str, Any]) -> Array:
        power1, power2 = state.get("powers", begun)
        state["powers"] = power1 * beta1, power2 * beta2
        if are_powers_ahead:
            power1, power2 = state["powers"]
        m, v = _zeros(state, "m", w), _zeros(state, "v", w)
        new_m = beta1 * m + (_ONE - beta1) * g
        new_v = beta2 * v + (_ONE - beta2) * g * g
        scaled = lr * np.sqrt(_ONE - power2) / (_ONE - power1)
        new = w - scaled * new_m / (np.sqrt(new_v) + epsilon)
        is_seen = np.any(g != 0, axis=1, keepdims=True) if is_lazy else np.True_
        state["m"], state["v"] = np.where(is_seen, new_m, m), np.where(is_seen, new_v, v)
        return np.where(is_seen, new, w)

    return step


def adamax(rate: float, beta1: float = 0.9, beta2: float = 0.999, epsilon: float = 1e-8) -> Kernel:
    lr, beta1, beta2, epsilon = _f32(rate, beta1, beta2, epsilon)

    def step(w: Array, g: Array, state: dict[str, Any]) -> Array:
        power = state.get("power", beta1)
        state["power"] = power * beta1
        state["m"] = beta1 * _zeros(state, "m", w) + (_ONE - beta1) * g
        state["u"] = np.maximum(np.abs(g), beta2 * _zeros(state, "u", w) + epsilon)
        return w - lr / (_ONE - power) * (state["m"] / state["u"])

    return step


def rmsprop(
    rate: float,
    rho: float = 0.95,
    epsilon: float = 1e-6,
    momentum: float = 0.0,
    centered: bool = False,
) -> Kernel:
    lr, rho, epsilon, mu = _f32(rate, rho, epsilon, momentum)

    def step(w: Array, g: Array, state: dict[str, Any]) -> Array:
        state["s"] = spread = rho * _zeros(state, "s", w) + (_ONE - rho) * g * g
        if centered:
            state["a"] = rho * _zeros(state, "a", w) + (_ONE - rho) * g
            spread = spread - state["a"] * state["a"]
        state["v"] = mu * _zeros(state, "v", w) + lr * g / np.sqrt(spread + epsilon)
        return w - state["v"]

    return step


def ftrl(rate: float, l1: float = 0.0, l2: float = 0.0, power: float = -0.5) -> Kernel:
    """`l2` is the kernel's argument, of which it adds twice; the front end of 1.8.5 passes l1."""
    lr, l1, l2, power = _f32(rate, l1, l2, -power)

    def step(w: Array, g: Array, state: dict[str, Any]) -> Array:
        before = _zeros(state, "s", w)
        state["s"] = after = before + g * g
        change = (after**power - before**power) / lr
        state["z"] = z = _zeros(state, "z", w) + g - change * w
        under = after**power / lr + np.float32(2) * l2
        return np.where(np.abs(z) > l1, (np.sign(z) * l1 - z) / under, np.float32(0))

    return step


def lamb(
    rate: float,
    decay: float = 0.01,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-6,
) -> Kernel:
    lr, decay, beta1, beta2, epsilon = _f32(rate, decay, beta1, beta2, epsilon)

    def step(w: Array, g: Array, state: dict[str, Any]) -> Array:
        state["m"] = beta1 * _zeros(state, "m", w) + (_ONE - beta1) * g
        state["v"] = beta2 * _zeros(state, "v", w) + (_ONE - beta2) * g * g
        update = state["m"] / (np.sqrt(state["v"]) + epsilon) + decay * w
        w_norm, u_norm = np.sqrt(np.sum(w * w)), np.sqrt(np.sum(update * update))
        ratio = w_norm / u_norm if w_norm > 0 and u_norm > 0 else _ONE
        return w - lr * ratio * update

    return step


def with_l2(coeff: float, kernel: Kernel) -> Kernel:
    """A regularizer adds the parameter, times a number, to its gradient."""
    (coeff,) = _f32(coeff)
    return lambda w, g, state: kernel(w, g + coeff * w, state)


def with_l1(coeff: float, kernel: Kernel) -> Kernel:
    """A regularizer adds the parameter's signs, times a number, to its gradient."""
    (coeff,) = _f32(coeff)
    return lambda w, g, state: kernel(w, g + coeff * np.sign(w), state)


def clipped(low: float, high: float, kernel: Kernel) -> Kernel:
    """Clipping by value, before the update."""
    return lambda w, g, state: kernel(w, np.clip(g, *_f32(low, high)), state)


def clipped_by_norm(most: float, kernel: Kernel) -> Kernel:
    """Clipping by a gradient's own norm; by the global one where there is one gradient."""
    (most,) = _f32(most)

    def step(w: Array, g: Array, state: dict[str, Any]) -> Array:
        norm = np.sqrt(np.sum(g * g))
        return kernel(w, g * (most / norm) if norm > most else g, state)

    return step
