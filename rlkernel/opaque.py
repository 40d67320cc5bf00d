"""An op made from its records: autograd in eager mode, and one opaque node each way where torch is traced.

``Call`` is a NamedTuple of what a backend is asked, ``Results`` one of what it answers; of these the first
few are the caller's.  Autograd, the schemas of the nodes, and what is saved and handed back follow from the
annotations: an option of an op is written in its record and in the kernels that use it, and nowhere between.
"""

import operator
import re
import typing
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler

from rlkernel import dispatch
from rlkernel.runtime import ranges, tracing
from rlkernel.runtime.modes import anchor, once_differentiable
from rlkernel.runtime.schema import holds_tensor, is_told, negative, part_of, resolved

Grads = tuple[Tensor | None, ...]


class Op:
    """An op: call it with its record, and get the caller's results.

    ``outputs`` of the results, all unless given, are the caller's; ``differentiable`` names those that have a
    gradient, and ``gradients`` the fields of the call that get one.  ``saves`` names the fields and the
    results whose tensors ``backward`` reads: it finds None in the place of others; ``saves_if`` names results
    that it reads where a field of the call, named beside it, is not None.

    ``pick(call)`` chooses the backend, or ``pick`` names the fields by whose tensors it is chosen;
    ``forward(impl, call)`` and ``backward(impl, call, results, grads)`` ask it.  ``backward`` returns a
    gradient for each of ``gradients``, or None; a field ``needs`` of the call tells which of them are wanted.
    ``like(call)`` gives empty results of the right shapes, None for those that the call does not ask for.

    ``traced``: ``backward`` is a few operations of torch, which a compiler may see; its ``impl`` is None.
    ``overwrites``: the field over which ``backward`` writes its gradient where ``call.inplace_backward``.
    ``in_node``: fields that have another value in a node, which may write over nothing.
    ``look(call)`` raises for values that the caller of a node could not read while it was traced.
    """

    def __init__(
        self,
        name: str,
        call: Any,
        results: Any,
        *,
        outputs: int | None = None,
        pick: Callable[[Any], Any] | tuple[str, ...],
        like: Callable[[Any], Any],
        forward: Callable[[Any, Any], Any] = lambda impl, call: impl.forward(call),
        backward: Callable[[Any, Any, Any, Grads], Grads] | None = None,
        gradients: tuple[str, ...] = (),
        differentiable: tuple[str, ...] = (),
        saves: tuple[str, ...] = (),
        saves_if: dict[str, str] | None = None,
        traced: bool = False,
        overwrites: str | None = None,
        in_node: dict[str, Any] | None = None,
        look: Callable[[Any], object] | None = None,
    ) -> None:
        fields, names, saves_if = call._fields, results._fields, saves_if or {}
        unknown = {*gradients, *saves, *differentiable, *saves_if} - {*fields, *names}
        if unknown:
            raise TypeError(f"{name} has no {', '.join(sorted(unknown))}")
        self.name, self.call, self.results = name, call, results
        self.outputs = outputs = len(names) if outputs is None else outputs
        self.pick = _chosen_for(name, fields, pick) if isinstance(pick, tuple) else pick
        self.like, self.forward, self.backward = like, forward, backward
        self.traced, self.overwrites, self.in_node, self.look = traced, overwrites, in_node or {}, look
        self.part = part_of("", call)
        self.is_negative = eval(f"lambda call: {negative('call', call)}", {"Tensor": Tensor})
        self.gradients = [fields.index(x) for x in gradients]
        self.constants = [i for i, x in enumerate(names[:outputs]) if x not in differentiable]
        self.sources, self.constant = _getter(self.gradients), _getter(self.constants)
        self.needs = fields.index("needs") if "needs" in fields else None
        self.store = _Store(call, results, {*saves, *saves_if}, saves_if)
        # what connects a gradient with its graph, where nothing does that is saved anyway
        linked = not {*self.gradients}.isdisjoint(self.store.fields)
        linked |= any(i < outputs and names[i] not in saves_if for i in self.store.results)
        self.anchored = not linked
        self.eager = _eager(self)
        self.node = _node(self)

    def __call__(self, call: Any) -> tuple[Any, ...]:
        if tracing.is_on() or call[0].is_meta:  # of which no backend has values
            there = [x is not None for x in self.like(call)[: self.outputs]]
            got = self.node(*self.flat(call))
            if isinstance(got, Tensor):  # the only result
                return (got,)
            return tuple(x if t else None for x, t in zip(got, there, strict=False))
        call = self.plain(call)
        if self.gradients and torch.is_grad_enabled():
            sources = self.sources(call)
            # what has a tangent of forward-mode AD is refused there, and would be lost here
            dual = forward_ad._current_level >= 0
            for x in sources:
                if x is not None and (dual or x.requires_grad):
                    return self.eager.apply(call, *sources)[: self.outputs]
        watched = profiler._is_profiler_enabled or ranges.nvtx  # no function: a small op takes microseconds
        return (self.named if watched else self.forward)(self.pick(call), call)[: self.outputs]

    def plain(self, call: Any) -> Any:
        """With the values in memory of tensors that torch would negate where it reads them, as it does the
        imaginary part of what was conjugated."""
        return resolved(call) if self.is_negative(call) else call

    def named(self, impl: Any, call: Any) -> Any:
        """``forward`` by its name in a profile."""
        with ranges.of(self.name, impl):
            return self.forward(impl, call)

    def named_backward(self, impl: Any, call: Any, results: Any, grads: Grads) -> Grads:
        assert self.backward is not None
        with ranges.of(self.name, impl, backward=True):
            return self.backward(impl, call, results, grads)

    def connected(self, computed: list[Any]) -> tuple[Any, ...]:
        """The caller's results of ``[impl, call, results]``, which was computed without their gradients."""
        return self.eager.apply(computed, *self.sources(computed[1]))[: self.outputs]

    def flat(self, call: Any) -> list[Any]:
        """The arguments of the node."""
        return list(self.part.flat(call))

    def made(self, flat: Sequence[Any], read: bool = True) -> Any:
        """The call of a node, of its arguments; without ``read`` for ``like``, which takes shapes of it."""
        return self.part.made(iter(flat), read)._replace(**self.in_node)


class _Store:
    """What a call and its results leave for ``backward``: tensors apart from plain values, and back.

    ``taken(call, results)`` gives the plain values and the tensors to save; ``back`` makes of these the call
    and the results, None in the place of tensors that were not saved.  ``layouts`` of what is saved lets
    ``relaid`` undo what hooks for saved tensors did to it: kernels read memory by the layout that forward
    gave it, and one that is dense always serves.  Each is one expression, written here as text: a loop over
    the fields would take longer than a small kernel.
    """

    def __init__(self, call: Any, results: Any, saves: set[str], saves_if: dict[str, str]) -> None:
        hints = typing.get_type_hints(call)
        self.fields = [i for i, x in enumerate(call._fields) if x in saves and holds_tensor(hints[x])]
        self.results = [i for i, x in enumerate(results._fields) if x in saves]
        plain: list[str] = []
        saved: list[str] = []
        fields: list[str] = []
        for i, name in enumerate(call._fields):
            if not holds_tensor(hints[name]):
                fields.append(f"plain[{len(plain)}]")
                plain.append(f"call[{i}]")
            elif i not in self.fields:
                fields.append("None")
            elif hints[name] in (Tensor, Tensor | None):
                fields.append(f"saved[{len(saved)}]")
                saved.append(f"call[{i}]")
            else:  # it may hold a number in a tensor's place
                fields.append(f"plain[{len(plain)}] if saved[{len(saved)}] is None else saved[{len(saved)}]")
                plain.append(f"None if isinstance(call[{i}], Tensor) else call[{i}]")
                saved.append(f"call[{i}] if isinstance(call[{i}], Tensor) else None")
        stats = ["None"] * len(results._fields)
        for i in self.results:
            condition = saves_if.get(results._fields[i])
            stats[i] = f"saved[{len(saved)}]"
            known = f"call[{call._fields.index(condition)}] is not None" if condition else "True"
            saved.append(f"results[{i}] if {known} else None")
        names = {"Tensor": Tensor, "new": tuple.__new__, "Call": call, "Results": results}
        self.taken = eval(f"lambda call, results: ({_tuple(plain)}, {_tuple(saved)})", names)
        made = f"new(Call, {_tuple(fields)}), new(Results, {_tuple(stats)})"
        self.back = eval(f"lambda plain, saved: ({made})", names)
        places = range(len(saved))
        layouts = [f"(x := saved[{i}]) is None or x.is_contiguous() or x.stride()" for i in places]
        self.layouts = eval(f"lambda saved: {_tuple(layouts)}", {})
        same = [
            f"x if (x := saved[{i}]) is None or (x.is_contiguous() or x.stride() == layouts[{i}])"
            f" and not x.is_neg() else x.resolve_neg().contiguous()"
            for i in places
        ]
        self.relaid = eval(f"lambda saved, layouts: {_tuple(same)}", {})


def _chosen_for(op: str, fields: tuple[str, ...], names: tuple[str, ...]) -> Callable[[Any], Any]:
    tensors = ", ".join(f"call[{fields.index(name)}]" for name in names)
    return eval(f"lambda call: dispatch.pick({op!r}, {tensors})", {"dispatch": dispatch})


def _tuple(parts: list[str]) -> str:
    return f"({''.join(f'{part}, ' for part in parts)})"


def _getter(places: list[int]) -> Callable[[Any], tuple[Any, ...]]:
    if len(places) > 1:
        return operator.itemgetter(*places)
    return operator.itemgetter(slice(places[0], places[0] + 1) if places else slice(0, 0))


def _eager(op: Op) -> Any:
    def forward(ctx: Any, call: Any, *sources: Any) -> Any:
        ctx.set_materialize_grads(False)
        # backward runs on the same backend, also on another thread or after the block that forced it
        if type(call) is list:
            ctx.impl, call, results = call
        else:
            ctx.impl = op.pick(call)
            watched = profiler._is_profiler_enabled or ranges.nvtx
            results = (op.named if watched else op.forward)(ctx.impl, call)
        ctx.plain, saved = op.store.taken(call, results)
        ctx.layouts = op.store.layouts(saved)
        outputs = results[: op.outputs]
        if op.overwrites is not None:
            ctx.overwritten = False
        if op.constants:
            ctx.mark_non_differentiable(*[x for x in op.constant(outputs) if x is not None])
        if op.anchored:
            graph = anchor(outputs[0])
            ctx.save_for_backward(*saved, graph)
            return *outputs, graph
        ctx.save_for_backward(*saved)
        return outputs

    @once_differentiable(op.name)
    def backward(ctx: Any, saved: Any, *grads: Any) -> Any:
        call, results = op.store.back(ctx.plain, op.store.relaid(saved, ctx.layouts))
        if op.needs is not None and call[op.needs] != (needs := tuple(ctx.needs_input_grad[1:])):
            call = call._replace(needs=needs)
        if op.overwrites is not None and call.inplace_backward:
            ctx.overwritten = True
            # other users of the tensor in this graph then raise instead of computing nonsense
            torch.autograd.graph.increment_version(getattr(call, op.overwrites))
        assert op.backward is not None
        watched = profiler._is_profiler_enabled or ranges.nvtx
        run = op.named_backward if watched else op.backward
        return None, *run(ctx.impl, call, results, resolved(grads[: op.outputs]))

    def backward_once(ctx: Any, *grads: Any) -> Any:
        if ctx.overwritten:
            why = f"got True: {op.overwrites} are gone"
            raise RuntimeError(f"inplace_backward must be False for a second backward, {why}")
        return backward(ctx, *grads)

    # a class statement would name the node in a graph after the statement
    functions = {
        "forward": staticmethod(forward),
        "backward": staticmethod(backward if op.overwrites is None else backward_once),
    }
    return type(f"_{op.name.title().replace('_', '')}", (torch.autograd.Function,), functions)


# Of what is traced.  What a node takes and gives are tensors and scalars: a result that is absent is empty.


def _node(op: Op) -> Any:
    schema = f"({', '.join(op.part.slots)}) -> ({', '.join(['Tensor'] * len(op.results._fields))})"

    def forward(*flat: Any) -> Any:
        call = op.plain(op.made(flat))
        if op.look is not None:
            op.look(call)
        return _apart(op.named(op.pick(call), call), flat)

    def fake(*flat: Any) -> Any:
        return _apart(op.like(op.made(flat, False)), ())

    node = torch.library.custom_op(f"rlkernel::{op.name}", forward, mutates_args=(), schema=schema)
    node.register_fake(fake)
    if op.backward is not None:
        _differentiate(op, node)
    return node


def _differentiate(op: Op, node: Any) -> None:
    slots, results = op.part.slots, len(op.results._fields)
    names = [slot.split()[1] for slot in slots]
    place = [names.index(op.call._fields[i]) for i in op.gradients]
    # the gradients have the shapes of their sources, and are connected to them
    kept = {*place, *(names.index(op.call._fields[i]) for i in op.store.fields)}
    kept |= {names.index(x) for x, hint in typing.get_type_hints(op.call).items() if is_told(hint)}
    run = None if op.traced else _backward_node(op, place)

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.there = [x is not None for x in op.like(op.made(inputs, False))]
        ctx.kept = [i for i in sorted(kept) if isinstance(inputs[i], Tensor)]
        ctx.flat = [None if isinstance(x, Tensor) else x for x in inputs]
        saved = *(inputs[i] for i in ctx.kept), *(output[i] for i in op.store.results)
        ctx.dense = [x.is_contiguous() for x in saved]
        ctx.save_for_backward(*saved)
        ctx.mark_non_differentiable(*(output[i] for i in op.constants), *output[op.outputs :])

    @once_differentiable(op.name)
    def autograd(ctx: Any, saved: Any, *grads: Any) -> Any:
        flat = list(ctx.flat)
        for i, x in zip(ctx.kept, saved, strict=False):
            flat[i] = x
        stats: list[Tensor | None] = [None] * results
        for i, x in zip(op.store.results, saved[len(ctx.kept) :], strict=True):
            stats[i] = x if ctx.there[i] else None
        upstream = [g if there else None for g, there in zip(grads[: op.outputs], ctx.there, strict=False)]
        needs = [ctx.needs_input_grad[i] for i in place]
        if run is None:
            found = _gradients(op, None, upstream, needs, stats, flat)
        else:
            places = *(results + i for i in ctx.kept), *op.store.results
            dense = [i for i, known in zip(places, ctx.dense, strict=True) if known]
            found = run(*upstream, needs, dense, *stats, *flat)
        given: list[Tensor | None] = [None] * len(flat)
        for i, need, g in zip(place, needs, found, strict=True):
            given[i] = g if need else None
        return tuple(given)

    node.register_autograd(autograd, setup_context=setup)


def _backward_node(op: Op, place: list[int]) -> Any:
    first, results = op.outputs, len(op.results._fields)
    slots = [f"Tensor? grad_{i}" for i in range(first)]
    # dense: which of the following forward found dense, whatever hooks for saved tensors made of them
    slots += ["bool[] wanted", "int[] dense", *(f"Tensor? result_{i}" for i in range(results))]
    slots += [re.sub("^Tensor ", "Tensor? ", slot) for slot in op.part.slots]

    def run(*every: Any) -> Any:
        grads, (needs, dense), read = every[:first], every[first : first + 2], list(every[first + 2 :])
        for i in dense:
            read[i] = None if read[i] is None else read[i].contiguous()
        stats, flat = resolved(tuple(read[:results])), read[results:]
        found = _gradients(op, op.pick(op.made(flat)), grads, needs, stats, flat)
        like = flat[place[0]]
        out: list[Tensor] = []
        for g, need in zip(found, needs, strict=True):
            if g is None or not need:
                out.append(like.new_empty(0))
            else:  # a node's results share no memory: one gradient of two sources is two
                out.append(g.clone() if any(g is x for x in (*out, *grads)) else g.contiguous())
        return out

    def fake(*every: Any) -> Any:
        needs, flat = every[first], every[first + 2 + results :]
        sources = [flat[i] for i in place]
        return [
            torch.empty(x.shape, dtype=x.dtype, device=x.device) if need else sources[0].new_empty(0)
            for x, need in zip(sources, needs, strict=True)
        ]

    schema = f"({', '.join(slots)}) -> Tensor[]"
    node = torch.library.custom_op(f"rlkernel::{op.name}_backward", run, mutates_args=(), schema=schema)
    node.register_fake(fake)
    return node


def _gradients(op: Op, impl: Any, grads: Any, needs: Any, results: Any, flat: Any) -> Grads:
    call = op.plain(op.made(flat))
    if op.needs is not None:
        call = call._replace(needs=tuple(needs))
    assert op.backward is not None
    run = op.backward if impl is None else op.named_backward  # None: of a compiler's graph
    return run(impl, call, op.results(*results), resolved(tuple(grads)))


def _apart(results: Any, inputs: Any) -> Tensor | tuple[Tensor, ...]:
    """The results of a node, none of which may share memory with another or with an input; one alone is no
    tuple."""
    there = [x for x in results if x is not None]
    taken = {x.untyped_storage()._cdata for x in inputs if isinstance(x, Tensor)}
    out = []
    for x in results:
        if x is None:
            x = there[0].new_empty(0)
        elif x.untyped_storage()._cdata in taken or x.storage_offset():
            x = x.clone()
        taken.add(x.untyped_storage()._cdata)
        out.append(x)
    return tuple(out) if len(out) > 1 else out[0]
