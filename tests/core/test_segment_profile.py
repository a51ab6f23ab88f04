"""What a segment holds, against counting by hand and against following every tensor."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zerograph.core.segment_profile import Operator, SegmentProfile, segment_profile


def product(writes: str, *reads: str, size: int = 1) -> Operator:
    return Operator(writes, reads, size, kernel=True, product=True)


def fuses(writes: str, *reads: str, size: int = 1) -> Operator:
    return Operator(writes, reads, size, kernel=False, product=False)


def test_logits_die_before_the_gradient_of_the_head_is_made() -> None:
    """The backward of a loss over ``logits``: what it makes of them is read by two products."""
    logits = 100
    operators = [
        fuses("shifted", "logits", size=logits),
        fuses("d_logits", "shifted", "tangent", size=logits),
        product("d_head", "d_logits", "hidden", size=60),
        product("d_hidden", "d_logits", "head", size=5),
    ]
    found = segment_profile(operators, {"d_head", "d_hidden"})
    assert found.levels == (logits, logits + 60, logits + 65), "what fuses has no memory"
    assert found.left == 65
    assert found.extra() == logits
    dying = [("logits", logits), ("tangent", logits)]
    assert found.held(dying) == [logits, 60 - logits, 65 - logits]
    assert found.extra(dying) == logits - 65


def test_what_is_left_takes_the_place_of_what_dies() -> None:
    operators = [product("sum", "given", size=1), product("big", "sum", size=50)]
    found = segment_profile(operators, {"big"})
    assert found.extra() == 1
    assert found.extra([("given", 50)]) == 1 - 50


def test_what_fuses_reads_where_its_kernel_runs() -> None:
    operators = [fuses("a", "given", size=8), product("other", "x", size=3), fuses("b", "a", "other", size=8)]
    assert segment_profile(operators, {"b"}).until == {"given": 1, "x": 0}, "until the end: interval 1 is the last"


def test_what_one_kernel_reads_is_there_until_it_has_written_all() -> None:
    operators = [fuses("a", "given", size=8), fuses("b", "other", size=8)]
    assert segment_profile(operators, {"a", "b"}).extra([("given", 8), ("other", 8)]) == 0


def test_an_element_wise_kernel_writes_over_a_product_that_dies_and_over_nothing_else() -> None:
    for first, over in ((product("a", "x"), True), (product("a", "x")._replace(product=False), False)):
        found = segment_profile([first, fuses("b", "a"), product("c", "b")], {"c"})
        assert found.levels[-1] == 2
        assert max(found.levels) == 2
        assert segment_profile([first, fuses("b", "a")], {"b"}).extra() == (0 if over else 1)


def test_what_is_reduced_is_not_written_over() -> None:
    """A loss reads its logits' maxima and writes their gradient in one kernel, beside them."""
    most = fuses("most", "logits")._replace(kernel=True)
    operators = [product("logits", "x"), most, fuses("grad", "logits", "most"), product("out", "grad")]
    assert max(segment_profile(operators, {"out"}).levels) == 3  # with the maxima
    given = [product("logits", "x"), fuses("grad", "logits", "most"), product("out", "grad")]
    assert max(segment_profile(given, {"out"}).levels) == 2


def test_cuts_begin_intervals() -> None:
    operators = [product("a", "x", size=7), product("b", "a", size=1), product("c", "b", size=2)]
    found = segment_profile(operators, {"c"}, cuts=[2])
    assert found.begins == (0, 1, 2) and found.levels == (7, 8, 3)


@st.composite
def segments(draw: st.DrawFn) -> tuple[list[Operator], set[str], dict[str, int]]:
    """Operators that are all kernels but products, what stays, and sizes of what they are given."""
    sizes = {f"given{i}": draw(st.integers(1, 50)) for i in range(draw(st.integers(1, 4)))}
    names, operators = list(sizes), []
    for i in range(draw(st.integers(1, 12))):
        reads = draw(st.lists(st.sampled_from(names), max_size=3))
        names.append(f"made{i}")
        operators.append(Operator(names[-1], reads, draw(st.integers(0, 50)), kernel=True, product=draw(st.booleans())))
    return operators, set(draw(st.lists(st.sampled_from([op.writes for op in operators])))), sizes


@given(segments())
def test_kernels_hold_what_following_every_tensor_finds(case: tuple[list[Operator], set[str], dict[str, int]]) -> None:
    operators, stays, sizes = case
    alive = dict(sizes)
    before, most = sum(alive.values()), 0
    for at, op in enumerate(operators):
        alive[op.writes] = op.bytes
        most = max(most, sum(alive.values()) - before)
        later = {name for other in operators[at + 1 :] for name in other.reads}
        used = {name for other in operators for name in other.reads}
        for name in [n for n in alive if n not in later and n not in stays and (n not in sizes or n in used)]:
            if name in op.reads or name == op.writes:
                del alive[name]
    found = segment_profile(operators, stays)
    assert found.left == sum(op.bytes for op in operators if op.writes in stays)
    assert max(found.held(sizes.items())) == max(most, 0)
    assert found.extra() >= found.extra(sizes.items())


def test_nothing_holds_nothing() -> None:
    assert segment_profile([], set()) == SegmentProfile() and SegmentProfile().extra() == 0
