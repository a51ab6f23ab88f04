"""Lower a rewritten graph to a :class:`~zerograph.core.program.Program`.

The graph is cut at its ``zg::`` nodes and where repeated layers begin; what lies between two cuts is a *segment*.
Segments with the same structure share one compiled callable, so that a deep model compiles in the time of one layer.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from zerograph.compiler.lowering.segment_graph import Body, body_of
from zerograph.compiler.lowering.segments import Callee, SegmentCache, interpret
from zerograph.compiler.source_lines import source_line
from zerograph.core.instructions import (
    Accumulate,
    BeginUpdate,
    Compute,
    Free,
    Gather,
    Instruction,
    Move,
    Place,
    Reduce,
    Scale,
    View,
    WaitFetch,
    WaitGather,
    WaitReduce,
    kept_shards,
    last_work,
)
from zerograph.core.machine import Tier, hops
from zerograph.core.param_bytes import (
    averaged_bytes,
    fetched_bytes,
    gathered_bytes,
    is_full,
    reduced_bytes,
    sent_bytes,
    shard_bytes,
)
from zerograph.core.placement import reads_again
from zerograph.core.plan import ParamTile, Placement, Plan, Residency, tile_label
from zerograph.core.program import Program, Register, Segment, ends_resident, stays_resident
from zerograph.core.step import Kind, layer_of_activation
from zerograph.graph import ops
from zerograph.graph.costs import (
    attention_flops,
    bytes_of,
    flops_of,
    memory_inside,
    memory_owner,
    moved_bytes,
    packed_bytes,
)
from zerograph.graph.layers import layer_of_node, layer_starts, module_of
from zerograph.graph.nodes import (
    BucketFact,
    SavedFact,
    TokenTile,
    is_size,  # arithmetic that every segment which needs it repeats
    output_of,
)
from zerograph.graph.torch_private import LOOKUP_SEED, MAKE_TOKEN
from zerograph.planner.programs.host_parts import with_host_parts
from zerograph.runtime.buffers import dtype_name
from zerograph.sim.check import require_programs


def returned_names(gm: fx.GraphModule) -> list[str]:
    """The names of what ``gm`` returns; empty ones of what is no tensor."""
    return [value.name if isinstance(value, fx.Node) else "" for value in _returned(gm)]


def lower(
    gm: fx.GraphModule,
    kind: str,
    cache: SegmentCache,
    plan: Plan,
    staging: Tier = "device",
    returned: Sequence[str] = (),
) -> tuple[Program, tuple[Callee, ...]]:
    """The program that ``gm`` stands for, which passes rewrote by ``plan``, and the callables of its segments.

    Transfers to and from NVMe pass through memory on ``staging``. ``returned`` are the names of what it returned before
    the passes, which the backward knows it by.
    """
    keep_together(gm.graph)
    return _Lowering(gm, kind, cache, plan, staging).run(returned)


def _returned(gm: fx.GraphModule) -> Sequence[Any]:
    return output_of(gm.graph).args[0]  # type: ignore[return-value]


def keep_together(graph: fx.Graph) -> None:
    """Move what unpacks a tuple to where it comes from, and a token of effects to where it is taken, so that no cut
    comes between: registers hold tensors.

    Random seeds move too: looked up where they are made, they leave the repeated layers without constants of their own.
    """
    *_, last_input = graph.find_nodes(op="placeholder", sort=True) or [None]
    for node in list(graph.nodes):
        if node.target is operator.getitem or node.target is LOOKUP_SEED:
            source = node.args[0]
            # Not right after its own placeholder: placeholders stand together at the graph's beginning.
            anchor = last_input if source.op == "placeholder" else source
            anchor.append(node)
        elif node.target is MAKE_TOKEN:
            (taker,) = node.users
            taker.prepend(node)


_Moving = Callable[[Tier, Tier, tuple[int, ...], tuple[int, ...]], Instruction]
"""Makes a move from tier to tier, and from the registers that it reads to those that it writes."""


class _Lowering:
    def __init__(self, gm: fx.GraphModule, kind: str, cache: SegmentCache, plan: Plan, staging: Tier) -> None:
        self.gm, self.kind, self.cache, self.plan, self.staging = gm, kind, cache, plan, staging
        self.split = staging != "device"  # whether the host has another memory than the device
        self.registers: dict[Any, int] = {}  # of nodes, and of constants that the graph returns
        self.instructions: list[Instruction] = []
        self.segments: dict[str, int] = {}
        self.described: list[Segment] = []
        self.callables: list[Callee] = []
        self.bytes: dict[int, int] = {}  # of registers whose nodes do not tell: transfers under way
        self.shared: dict[int, int] = {}  # registers in the memory of another one
        self.names: dict[int, str] = {}  # of registers that stand for what another node made
        self.tiers: dict[int, Tier] = {}  # of registers that are not on the device
        self.order = {node: i for i, node in enumerate(gm.graph.nodes)}
        self.symbols = _symbol_inputs(gm.graph)

    def run(self, returned: Sequence[str]) -> tuple[Program, tuple[Callee, ...]]:
        placeholders = list(self.gm.graph.find_nodes(op="placeholder"))
        # First of all: inputs fill registers 0, 1, ... in the order in which they are given.
        for node in placeholders:
            self._register(node)
        pending: list[fx.Node] = []
        # A cut where each layer begins: else what stands before the first one would make that layer's segment unlike
        # others'.
        layers = set(layer_starts(self.gm.graph))
        for node in self.gm.graph.nodes:
            # Constants belong to the segments that read them, what a wait unpacks to the wait's instruction.
            if node.op in ("placeholder", "get_attr") or _is_result(node):
                continue
            cut = node.target in ops.INSTRUCTIONS or node.op == "output"
            if cut or node in layers:
                self._flush(pending)
                pending = []
            if cut:
                self._emit(node)
            else:
                pending.append(node)
        outputs = self._outputs()
        for name, value, register in zip(returned, _returned(self.gm), outputs, strict=False):
            if isinstance(value, fx.Node) and value.name != name and register is not None:
                self.names.setdefault(register, name)
        program = Program(
            kind=self.kind,
            inputs=len(placeholders),
            registers=len(self.registers),
            instructions=_with_deaths(self._with_facts(), outputs),
            outputs=outputs,
            segments=tuple(self.described),
            contents=self._contents(),
            buckets=tuple(bucket.name for bucket in self.plan.buckets),
        )
        # Cheap beside compiling, and a wrong order of gathers and frees would only show as wrong losses.
        require_programs([program], "this is a bug of zerograph: report it with the model")
        return program, tuple(self.callables)

    def _with_facts(self) -> list[Instruction]:
        """The instructions with what only those around them tell."""
        return with_host_parts(_with_updates(_with_moves(self.instructions), self.plan), self.plan, self.kind)

    def _contents(self) -> tuple[Register, ...]:
        first: dict[Any, int] = {}
        found = []
        for key, index in self.registers.items():
            # Registers of views refer to memory that another one holds: bytes are counted once, by storage.
            owner = memory_owner(key) if isinstance(key, fx.Node) else key
            storage = first.setdefault(owner, self.shared.get(index, index))
            name = self.names.get(index) or (key.name if isinstance(key, fx.Node) else str(key[1]))
            size = bytes_of(owner.meta.get("val")) if isinstance(owner, fx.Node) else 0
            found.append(
                Register(name, self.bytes.get(index, size), storage, _kind(key), self.tiers.get(index, "device"))
            )
        return tuple(found)

    def _register(self, node: Any) -> int:
        return self.registers.setdefault(_key(node), len(self.registers))

    def _regs(self, nodes: Any) -> tuple[int, ...]:
        return tuple(self.registers[_key(n)] for n in nodes)

    def _outputs(self) -> tuple[int | None, ...]:
        return tuple(None if v is None else self.registers[_key(v)] for v in _returned(self.gm))

    def _emit(self, node: fx.Node) -> None:
        """Turn one ``zg::`` node into an instruction."""
        if node.op == "output":
            self._compute_sizes([n for n in node.all_input_nodes if is_size(n) and n.op != "placeholder"])
            self._return_constants([v for v in node.args[0] if v is not None and not isinstance(v, fx.Node)])  # type: ignore[union-attr]
            return
        info: Any = node.meta.get("zg")
        results = _results(node)
        outs = tuple(self._register(results[k]) for k in range(len(results)))
        match node.target:
            case ops.GATHER:
                size = sent_bytes(info.params)
                shards, out = self._regs(node.args[0]), self._register(node)
                resident = self.kind == "backward" and stays_resident(self._residency(info), "forward")
                instruction: Instruction = Gather(
                    info.bucket, info.params, shards, out, bytes=size, **_tile(info), resident=resident
                )
                placement = self._placement(info)
                # Others are where they were, or where they were fetched to.
                filled = [p for p in info.params if not is_full(p, placement, self.split)]
                if not filled:
                    self.shared[out] = self.shared.get(shards[0], out)
                self.bytes[out] = gathered_bytes(filled)
            case ops.WAIT_GATHER:
                pending, resident = self.registers[node.args[0]], stays_resident(self._residency(info), self.kind)  # type: ignore[index]
                instruction = WaitGather(pending, outs, bucket=info.bucket, **_tile(info), resident=resident)
            case ops.FREE:
                # The graph frees every bucket after its last use; by residency it then stays for a later program.
                resident = stays_resident(self._residency(info), self.kind)
                ends = ends_resident(self._residency(info), self.kind)
                instruction = Free(info.bucket, self._regs(node.args[0]), resident=resident, **_tile(info), ends=ends)
            case ops.REDUCE:
                size, grads = reduced_bytes(info.params), self._regs(node.args[0])
                own = averaged_bytes(info.params)
                instruction = Reduce(
                    info.bucket, info.params, grads, self._register(node), bytes=size, **_tile(info), averaged=own
                )
            case ops.WAIT_REDUCE:
                instruction = WaitReduce(self.registers[node.args[0]], outs, bucket=info.bucket, **_tile(info))  # type: ignore[index]
            case ops.FETCH:
                placement = self._placement(info)
                tier, reads, out = placement.parameters, self._regs(node.args[0]), self._register(node)
                size = sum(fetched_bytes(p, placement, self.split) for p in info.params)
                if tier == "host":
                    self.tiers |= dict.fromkeys(reads, tier)
                move, self.bytes[out] = self._move("shard", node, size, tier), size
                instruction = self._carry(move, tier, "device", reads, (out,), self._staged(node, tier, [size]))
            case ops.WAIT_FETCH:
                pending = self.registers[node.args[0]]  # type: ignore[index]
                instruction = WaitFetch(pending, outs, by_gather=info.by_gather)
                self.shared |= dict.fromkeys(outs, pending)
            case ops.VIEW:
                source, dim, begin, end = node.args
                instruction = View(self._regs([source])[0], self._register(node), dim, begin, end)  # type: ignore[arg-type, index]
            case ops.PLACE:
                _, _, shape, dim, begin = node.args
                instruction = Place(**self._end_of_tile(node), shape=tuple(shape), dim=dim, begin=begin)  # type: ignore[arg-type]
            case ops.ACCUMULATE:
                instruction = Accumulate(**self._end_of_tile(node), dtype=dtype_name(node.meta["val"].dtype))
            case ops.SCALE:
                (source, by), out = self._regs(node.args), self._register(node)
                module, _ = _module_and_line([node])
                instruction = Scale(source, by, out, moved=2 * bytes_of(node.meta["val"]), module=module)
                self.shared[out] = self.shared.get(source, source)
            case ops.SPILL_SAVED:
                staged = self._staged(node, info.tier, info.bytes)
                self.shared |= {out: staged[first] for out, first in zip(staged, info.memory, strict=False)}
                move = self._move_saved(info)
                instruction = self._carry(move, "device", info.tier, self._regs(node.args[0]), outs, staged)
                self._describe_saved(info, node.args[0], outs)
            case ops.FETCH_SAVED:
                out, reads = self._register(node), self._regs(node.args[0])
                self.tiers |= dict.fromkeys(reads, info.tier)
                staged = self._staged(node, info.tier, [sum(info.bytes)])
                instruction = self._carry(self._move_saved(info), info.tier, "device", reads, (out,), staged)
            case ops.WAIT_FETCH_SAVED:
                pending = self.registers[node.args[0]]  # type: ignore[index]
                instruction = WaitFetch(pending, outs)
                self._describe_saved(info, node.args[1], outs)
            case _:
                sizes = [shard_bytes(p) for p in info.params]
                tier, reads = self._placement(info).spilled, self._regs(node.args[0])
                into = self._regs([into for into in node.args[2:] if into is not None])
                move = self._move("gradient", node, sum(sizes), tier)
                instruction = self._carry(move, "device", tier, reads, outs, self._staged(node, tier, sizes), into)
        self.instructions.append(instruction)

    def _residency(self, info: BucketFact) -> Residency:
        return self.plan.buckets[info.bucket].residency

    def _placement(self, info: BucketFact) -> Placement:
        return self.plan.buckets[info.bucket].placement

    def _end_of_tile(self, node: fx.Node) -> dict[str, Any]:
        """The fields that ends of tiles have in common; all that make one tensor write to one register."""
        terms, into = node.args[:2]
        vals = [each.meta["val"] for each in terms]  # type: ignore[union-attr]
        product = len(vals) == 2
        flops = 2 * vals[0].numel() * vals[1].shape[1] if product else 0
        # What is added to is read as well as written.
        into_bytes = (1 if into is None else 2) * bytes_of(node.meta["val"])
        moved = 2 * bytes_of(vals) if node.target is ops.PLACE else bytes_of(vals) + into_bytes
        module, source = _module_and_line([node])
        return {
            "terms": self._regs(terms), "out": self._register(node), "first": into is None, "flops": flops,
            "moved": moved, "packed": bytes_of(vals) if product else 0, "module": module, "source": source,
        }  # fmt: skip

    def _staged(self, node: fx.Node, tier: Tier, sizes: Sequence[int]) -> tuple[int, ...]:
        """Registers on the host for what moves between the device and ``tier``; none where these are neighbours."""
        if len(hops(tier, "device", self.staging)) == 1:
            return ()
        found = tuple(self._register(f"staged_{node.name}_{k}") for k in range(len(sizes)))
        self.tiers |= dict.fromkeys(found, "host")
        self.bytes |= zip(found, sizes, strict=True)
        return found

    def _carry(
        self, move: _Moving, source: Tier, target: Tier, reads: tuple[int, ...], outs: tuple[int, ...],
        staged: tuple[int, ...], into: tuple[int, ...] = (),
    ) -> Instruction:  # fmt: skip
        """The move from ``source`` to ``target``, beside what of it is there (``into``); or the second of two, where it
        is ``staged`` between them."""
        self.tiers |= dict.fromkeys(outs, target)
        *first, last = hops(source, target, self.staging)
        self.instructions += (move(*hop, reads, staged) for hop in first)
        return move(*last, (staged or reads) + into, outs)

    def _move(self, what: str, node: fx.Node, size: int, tier: Tier) -> _Moving:
        info = node.meta["zg"]
        name = self.plan.buckets[info.bucket].name
        label = tile_label(name, info.tile, info.tiles)
        facts = {"bucket": info.bucket, "tile": info.tile, "params": info.params, "offload_tier": tier}
        return lambda a, b, reads, outs: Move(a, b, what, label, name, size, reads, outs, **facts)

    def _move_saved(self, info: SavedFact) -> _Moving:
        module, size = layer_of_activation(info.label) or info.label, sum(info.bytes)
        what, tier = "activations", info.tier
        return lambda a, b, reads, outs: Move(a, b, what, info.label, module, size, reads, outs, offload_tier=tier)

    def _describe_saved(self, info: SavedFact, tensors: Any, outs: tuple[int, ...]) -> None:
        """Registers ``outs`` hold what ``tensors`` do, on another tier."""
        for out, first, tensor in zip(outs, info.memory, tensors, strict=True):
            self.names[out], self.shared[out], self.bytes[out] = tensor.name, outs[first], info.bytes[first]

    def _flush(self, nodes: list[fx.Node]) -> None:
        """Make a segment of the compute nodes between two cuts."""
        # Sizes are computed inside of every segment that needs them, from its symbols: they cost no register.
        inside = {n for n in nodes if not is_size(n)}
        if not inside:
            return
        outs = [n for n in nodes if n in inside and _leaves(n, inside)]
        # Nothing reads it, it writes to nothing that outlives it, and asserts nothing.
        if not outs and not any(n.is_impure(impure_random=False) for n in inside):
            return
        computing = [n for n in nodes if n in inside]
        body = body_of(self.gm, computing, outs, self.symbols)
        inputs, digest = body.inputs, body.digest()
        callee = self.cache.get(body, digest)
        known = self.segments.get(digest)  # repeated layers cost the same
        segment = _segment(digest, computing, outs, inputs) if known is None else self.described[known]
        facts = (n.meta.get("zg") for n in computing)
        tiles = max((fact.tiles for fact in facts if isinstance(fact, TokenTile)), default=1)
        self._append_compute(segment, callee, inputs, outs, *_module_and_line(computing), tiles)

    def _compute_sizes(self, sizes: list[fx.Node]) -> None:
        """Symbolic sizes that the graph returns: plain integer arithmetic, not worth a compiler."""
        if sizes:
            body = body_of(self.gm, sizes, sizes, self.symbols)
            self._append_compute(Segment(body.digest(), len(sizes)), interpret(body.module()), body.inputs, sizes)

    def _return_constants(self, values: list[Any]) -> None:
        """Sizes and conditions that tracing found to be constant, which AOTAutograd saves all the same."""
        if values:
            body = Body(self.gm, [], [], values)
            self._append_compute(Segment(body.digest(), 0), interpret(body.module()), [], values)

    def _append_compute(
        self,
        segment: Segment,
        callee: Callee,
        inputs: list[fx.Node],
        outs: list[Any],
        module: str = "",
        source: str = "",
        token_tiles: int = 1,
    ) -> None:
        # Layers that are alike share a digest, and with it one callable.
        if segment.digest not in self.segments:
            self.segments[segment.digest] = len(self.callables)
            self.described.append(segment)
            self.callables.append(callee)
        args, results = self._regs(inputs), tuple(self._register(n) for n in outs)
        self.instructions.append(Compute(self.segments[segment.digest], args, results, (), module, source, token_tiles))


def _tile(info: BucketFact) -> dict[str, Any]:
    return {"tile": info.tile, "tiles": info.tiles}


def _module_and_line(nodes: list[fx.Node]) -> tuple[str, str]:
    """The module that a segment computes, and a line of the user's code.

    A repeated layer has its name and first line. Outside of layers a segment may hold a norm, the head and the loss: it
    has the module of its largest product, and the line that makes its largest tensor, where memory has its peak.
    """
    layer = next((layer for n in nodes if (layer := layer_of_node(n))), "")
    module, ordered = layer, nodes
    if not layer:
        module = module_of(max(nodes, key=flops_of)) or ""
        ordered = sorted(nodes, key=lambda n: -bytes_of(n.meta.get("val")))
    # One after another: to find a line, a stack trace is searched.
    return module, next((line for n in ordered if (line := source_line(n))), "")


def _segment(digest: str, nodes: list[fx.Node], outs: list[fx.Node], inputs: list[fx.Node]) -> Segment:
    return Segment(
        digest,
        len(nodes),
        flops=sum(map(flops_of, nodes)),
        moved=moved_bytes(nodes, outs),
        memory=memory_inside(nodes, outs, inputs),
        packed=sum(map(packed_bytes, nodes)),
        attention=sum(map(attention_flops, nodes)),
    )


def _kind(key: Any) -> Kind:
    """The role of what a register holds, as far as one graph tells."""
    if not isinstance(key, fx.Node):
        return "temporary"
    if key.op == "placeholder":
        gathered = any(user.target in (ops.GATHER, ops.FETCH) for user in key.users)
        return "param" if gathered else "input"
    if key.target is ops.GATHER:
        return "gathered"
    if key.target is ops.FETCH:
        return "param"
    if key.target is ops.FETCH_SAVED:
        return "activation"
    if _is_result(key):
        return _UNPACKED[key.args[0].target]  # type: ignore[union-attr]
    return "temporary"


_UNPACKED: dict[Any, Kind] = {
    ops.WAIT_GATHER: "gathered",
    ops.WAIT_FETCH: "param",
    ops.WAIT_REDUCE: "gradient",
    ops.SPILL: "gradient",
    ops.SPILL_SAVED: "activation",
    ops.WAIT_FETCH_SAVED: "activation",
}
"""The operators that return several tensors, and what these are."""


def _key(value: Any) -> Any:
    if not isinstance(value, fx.Node):
        return type(value), value  # 1, 1.0 and True are equal
    into = _earlier_tiles(value)
    while into is not None:
        value, into = into, _earlier_tiles(into)
    return value


def _earlier_tiles(node: fx.Node) -> fx.Node | None:
    """The tensor that a tile is written into, where ``node`` is what is there then; None for the first tile."""
    if node.target in (ops.PLACE, ops.ACCUMULATE):
        return node.args[1]  # type: ignore[return-value]
    if _is_result(node) and node.args[0].target is ops.SPILL:  # type: ignore[union-attr]
        return next(iter(node.args[0].args[2:]), None)  # type: ignore[union-attr, return-value, arg-type]
    return None


def _is_result(node: fx.Node) -> bool:
    """Whether ``node`` unpacks what a wait returns."""
    source = node.args[0] if node.args else None
    return node.target is operator.getitem and isinstance(source, fx.Node) and source.target in _UNPACKED


def _results(node: fx.Node) -> dict[int, fx.Node]:
    return {user.args[1]: user for user in node.users if _is_result(user)}  # type: ignore[misc]


def _leaves(node: fx.Node, inside: set[fx.Node]) -> bool:
    return any(user not in inside for user in node.users)


def _symbol_inputs(graph: fx.Graph) -> dict[Any, fx.Node]:
    """The placeholder that carries each symbolic size."""
    found: dict[Any, fx.Node] = {}
    for node in graph.find_nodes(op="placeholder"):
        val = node.meta.get("val")
        if isinstance(val, torch.SymInt) and val.node.expr.is_symbol:
            found.setdefault(val.node.expr, node)
    return found


def _with_moves(instructions: Sequence[Instruction]) -> list[Instruction]:
    """Note on gathers and reductions which of their shards and gradients move, and on moves which are the last."""
    moves = [i for i in instructions if isinstance(i, Move)]
    fetched = {i.bucket for i in moves if i.what == "shard"}
    gradients = [i for i in moves if i.what == "gradient"]
    leaving = {i.bucket for i in gradients}
    to_host = {p.name for i in gradients if i.target == "host" for p in i.params}
    last = {id(i) for i in {i.writes: i for i in gradients}.values()}
    params = {i.out: i.params for i in instructions if isinstance(i, Reduce)}
    found: list[Instruction] = []
    for each in instructions:
        match each:
            case Gather(bucket=bucket):
                each = dataclasses.replace(each, fetched=bucket in fetched)
            case WaitReduce(bucket=bucket, pending=pending, tiles=tiles):
                stay = [k for k, p in enumerate(params[pending]) if p.name not in to_host]
                # Autograd gets all tiles of a gradient together, behind the last.
                updatable = tuple(stay) if tiles == 1 else ()
                each = dataclasses.replace(each, leaves=bucket in leaving, updatable=updatable)
            case Move(what="gradient", params=(first, *_)):
                each = dataclasses.replace(
                    each, complete=id(each) in last and not (each.staged and isinstance(first, ParamTile))
                )
        found.append(each)
    return found


def _with_updates(instructions: Sequence[Instruction], plan: Plan) -> list[Instruction]:
    """Let an update of each bucket that is reduced begin behind the last instruction that works for it, and keep for it
    what it would read again."""
    reduced = {i.bucket for i in instructions if isinstance(i, Reduce)}
    begins = {bucket: place for bucket, place in last_work(instructions).items() if bucket in reduced}
    kept = {place for bucket, place in kept_shards(instructions, begins).items() if reads_again(plan.buckets[bucket])}
    updates = {place: BeginUpdate(bucket) for bucket, place in begins.items()}
    found: list[Instruction] = []
    for place, each in enumerate(instructions):
        found.append(dataclasses.replace(each, kept=True) if isinstance(each, Move) and place in kept else each)
        found += [updates[place]] if place in updates else []
    return found


def _with_deaths(instructions: Sequence[Instruction], outputs: tuple[int | None, ...]) -> tuple[Instruction, ...]:
    """Note on each instruction the registers that nothing reads after it."""
    alive = {r for r in outputs if r is not None}
    result: list[Instruction] = []
    # From the end, so that a register is met first at its last use.
    for instruction in reversed(instructions):
        touched = dict.fromkeys(instruction.reads + instruction.writes)
        result.append(dataclasses.replace(instruction, dead=tuple(r for r in touched if r not in alive)))
        alive |= set(touched)
    return tuple(reversed(result))
