"""Operators from their records: dispatch to backends, gradients of any order, vmap, one node per graph, and exports.

A call is a NamedTuple of tensors, then options. Its operator names the backends in order of preference, the definition
last: torch differentiates that one, twice if need be, and so it serves the second derivatives of all others."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn, get_type_hints

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd import Function, forward_ad

from linattn.names import unknown_name
from linattn.ops import library
from linattn.ops.library import differentiable
from linattn.ops.numerics import is_exporting, without_autocast

Tensors = tuple[Tensor | None, ...]


class Backend(NamedTuple):
    """One form of an operator.

    It runs on its `devices` (empty: on all); if `one_token`, only calls of a single token; if it `loops`, not in graphs
    that would unroll the loops. `unsupported(call)` returns any other reason why it cannot run a call, from shapes,
    dtypes and devices alone; `experimental(call)`, a reason to run only calls that name the backend.

    `forward(call, save)` returns the outputs, then tensors for the gradient: `saved` is their number, and they are
    empty unless `save`. `gradient(call, tensors, grads)` takes these tensors and the outputs' gradients; it returns one
    gradient or None per tensor of the call, and recomputes tensors that are empty or None (as inside vmap). `empty` and
    `empty_gradient` return uninitialized results, for tracing. Without a gradient, torch differentiates `forward`."""

    name: str
    unsupported: Callable[[Any], str | None] | None
    forward: Callable[[Any, bool], tuple[Tensor, ...]]
    gradient: Callable[[Any, Tensors, Tensors], Tensors] | None = None
    empty: Callable[[Any, bool], tuple[Tensor, ...]] | None = None
    empty_gradient: Callable[[Any], Tensors] | None = None
    saved: int = 0
    devices: tuple[str, ...] = ()
    one_token: bool = False
    loops: bool = False
    experimental: Callable[[Any], str | None] | None = None

    def refusal(self, call: Any, named: bool = False) -> str | None:
        """Return why the backend does not run the call, or None. If experimental, it has to be `named` in the call."""
        x = call[0]
        if self.devices and x.device.type not in self.devices:
            return f"needs {' or '.join(map(str.upper, self.devices))} tensors, but they are on {x.device.type}"
        if self.one_token and x.shape[-2] != 1:
            return f"takes one token at a time, but q is {tuple(x.shape)}"
        # graphs for export or of transforms; others hold the form as one operation
        if self.loops and torch.compiler.is_compiling() and (is_exporting() or in_transform()):
            return "has loops, which this graph would unroll"
        reason = self.unsupported(call) if self.unsupported else None
        return self.experimental(call) if reason is None and self.experimental and not named else reason

    def run(self, call: Any) -> tuple[Tensor, ...]:
        return self.forward(call, False)


class Operator:
    """A function of calls of the class `call` that returns `outputs` tensors, in any of its `backends`."""

    def __init__(self, name: str, call: type[Any], outputs: int, backends: Sequence[Backend]):
        self.name, self.call, self.outputs, self.backends = name, call, outputs, tuple(backends)
        self.run = {b.name: DifferentiableBackend(self, b) if b.gradient else b.run for b in self.backends}

    def choose(self, call: Any, backend: str | None = None) -> Callable[[Any], tuple[Tensor, ...]]:
        """Return the function of the named backend, or of the first backend that can run the call."""
        if backend is not None and not (isinstance(backend, str) and backend in self.run):
            raise unknown_name("backend", backend, self.run)
        reasons = []
        for candidate in self.backends:
            if backend in (None, candidate.name):
                reason = candidate.refusal(call, named=backend is not None)
                if reason is None:
                    run = self.run[candidate.name]
                    return run if call[0].ndim > 2 else partial(_run_row, run)
                reasons.append(f"  {candidate.name}: {reason}")
        raise NotImplementedError("\n".join(["no backend can run this call:", *reasons]))

    def explain(self, call: Any) -> str:
        """Return one line per backend: it runs the call, it can run it when named, or the reason why it cannot."""
        reasons = {b.name: b.refusal(call) for b in self.backends}
        choice = next(name for name, reason in reasons.items() if reason is None)
        can = {name: "runs this call" if name == choice else "can run it, when named" for name in reasons}
        return "\n".join(f"{name}: {can[name] if reason is None else reason}" for name, reason in reasons.items())


def _run_row(run: Callable[[Any], tuple[Tensor, ...]], call: Any) -> tuple[Tensor, ...]:
    """Run a call without leading dimensions with one, as backends need it."""
    row = {name: x.unsqueeze(0) for name, x in call._asdict().items() if isinstance(x, Tensor)}
    return tuple(x.squeeze(0) for x in run(call._replace(**row)))


def in_transform() -> bool:
    """Return whether vmap, jvp or another function transform is active. Transforms do not see into a custom operation
    and would take its tangents as zero."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


class DifferentiableBackend:
    """A backend with its own gradient, as one operation of autograd and, for graphs, one of torch.library: a compiler
    would unroll its loops."""

    def __init__(self, operator: Operator, backend: Backend):
        self.backend, self.outputs, self.definition = backend, operator.outputs, operator.backends[-1].forward
        self.make, fields = operator.call, get_type_hints(operator.call)
        schema = [f"{library.SCHEMA[kind]} {name}" for name, kind in fields.items()]
        self.tensors = sum(field.startswith("Tensor") for field in schema)
        self.traced = library.define(self, f"{operator.name}_{backend.name}", schema)

    def __call__(self, call: Any) -> tuple[Tensor, ...]:
        save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in call[: self.tensors])
        if torch.compiler.is_compiling():
            return self.traced(*call, save)[: self.outputs]
        if forward_ad._current_level >= 0:
            _refuse_forward_mode(call[: self.tensors])
        if save or torch._C._are_functorch_transforms_active():
            options = (*call[self.tensors :], save)
            return _Differentiable.apply(self, options, *call[: self.tensors])[: self.outputs]
        with without_autocast(call[0]):
            return self.backend.forward(call, False)[: self.outputs]

    def gradient(self, *arguments: Any) -> Tensors:
        """Return the gradient. The arguments are the upstream gradients, the saved tensors, and the call's fields."""
        assert self.backend.gradient is not None
        first = self.outputs + self.backend.saved
        grads, saved, call = arguments[: self.outputs], arguments[self.outputs : first], self.make(*arguments[first:])
        with without_autocast(call[0]):
            results = self.backend.gradient(call, saved, grads)
        # neither autograd nor torch.library lets a function return one of its arguments
        return tuple(g.clone() if g is not None and any(g is x for x in grads) else g for g in results)

    def with_zeros(self, call: Any, grads: Tensors) -> Tensors:
        """Return the outputs' gradients `grads` with zeros in place of None, as autograd gives for unused outputs."""
        if all(g is not None for g in grads):
            return grads
        assert self.backend.empty is not None
        results = self.backend.empty(call, False)
        return tuple(x.new_zeros(x.shape) if g is None else g for g, x in zip(grads, results, strict=False))


class _ReverseMode(Function):
    """A function without a forward-mode derivative."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> NoReturn:
        raise NotImplementedError(_NO_FORWARD_MODE)


class _Differentiable(_ReverseMode):
    """One call of a backend and, as its derivative, the backend's own gradient."""

    @staticmethod
    def forward(form: DifferentiableBackend, options: tuple[Any, ...], *tensors: Tensor | None) -> tuple[Tensor, ...]:
        call = form.make(*tensors, *options[:-1])
        with without_autocast(call[0]):
            results = form.backend.forward(call, options[-1])
        # a saved tensor may be an input itself; autograd requires a view of it
        return tuple(x.view_as(x) if any(x is tensor for tensor in tensors) else x for x in results)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.form, ctx.options, *tensors = inputs
        saved = output[ctx.form.outputs :]
        ctx.mark_non_differentiable(*saved)
        ctx.save_for_backward(*saved, *tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        form, options, tensors, grads = ctx.form, ctx.options[:-1], ctx.saved_tensors, grads[: ctx.form.outputs]
        _refuse_old_vmap(grads)
        grads = form.with_zeros(form.make(*tensors[form.backend.saved :], *options), grads)
        return None, None, *_Gradient.apply(form, options, *grads, *tensors)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        return _vmap(_Differentiable, info.batch_size, in_dims, args)


class _Gradient(_ReverseMode):
    """The gradient of a call. For its own derivatives torch differentiates the gradient of the definition."""

    @staticmethod
    def forward(form: DifferentiableBackend, options: tuple[Any, ...], *tensors: Tensor | None) -> Tensors:
        return form.gradient(*tensors, *options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        ctx.form, ctx.options, *tensors = inputs
        ctx.save_for_backward(*tensors[-ctx.form.tensors :], *tensors[: ctx.form.outputs])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Tensors:
        count, tensors = ctx.form.tensors, ctx.saved_tensors
        with without_autocast(tensors[0]):
            second = _second_derivative(ctx.form, ctx.options, tensors, grads)
        return None, None, *second[count:], *[None] * ctx.form.backend.saved, *second[:count]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        # saved tensors were laid out for another number of dimensions
        saved = slice(2 + args[0].outputs, len(args) - args[0].tensors)
        args = *args[: saved.start], *[None] * args[0].backend.saved, *args[saved.stop :]
        return _vmap(_Gradient, info.batch_size, in_dims, args)


def _second_derivative(
    form: DifferentiableBackend, options: tuple[Any, ...], tensors: Tensors, grads: Tensors
) -> list[Tensor | None]:
    """Return the derivatives of the gradient, as the operator's definition gives it, with respect to `tensors`: the
    call's tensors, then the outputs' gradients. `grads` are the upstream gradients. Torch can differentiate the
    derivatives once more."""
    mask = [differentiable(x) for x in tensors]
    inputs, input_mask = tensors[: form.tensors], mask[: form.tensors]

    def run(*variables: Tensor) -> tuple[Tensor, ...]:
        remaining = iter(variables)
        arguments = [next(remaining) if m else x for x, m in zip(inputs, input_mask, strict=True)]
        return form.definition(form.make(*arguments, *options), False)

    def gradient(*variables: Tensor) -> tuple[Tensor, ...]:
        pullback = torch.func.vjp(run, *variables[: -form.outputs])[1]
        return pullback(variables[-form.outputs :])

    pullback = torch.func.vjp(gradient, *(x for x, m in zip(tensors, mask, strict=True) if m))[1]
    second = iter(pullback(tuple(g for g, m in zip(grads, input_mask, strict=True) if m)))
    return [next(second) if m else None for m in mask]


def _vmap(function: Any, size: int, in_dims: tuple[Any, ...], args: tuple[Any, ...]) -> tuple[Any, Any]:
    """Apply a Function under vmap: the mapped dimension of each of `args` becomes one more leading dimension."""

    def front(x: Any, dim: int | None) -> Any:
        if not isinstance(x, Tensor):
            return x
        return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)

    # the form and the options stand first and are no tensors
    results = function.apply(*args[:2], *map(front, args[2:], in_dims[2:]))
    return results, tuple(None if x is None else 0 for x in results)


def _refuse_old_vmap(grads: Tensors) -> None:
    if any(g is not None and is_legacy_batchedtensor(g) for g in grads):
        raise NotImplementedError(
            "is_grads_batched and jacobian(vectorize=True) use a vmap that knows no custom operators: take "
            'torch.func.jacrev, torch.func.vmap of a function of torch.func.vjp, or backend="reference"'
        )


def _refuse_forward_mode(tensors: Tensors) -> None:
    if any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError(_NO_FORWARD_MODE)


_NO_FORWARD_MODE = (
    "linear attention has no forward-mode derivative: take a reverse-mode one (torch.func.grad, vjp or jacrev; "
    'for a Hessian, jacrev of jacrev, or torch.autograd.functional.hessian) or backend="reference"'
)
