"""The torch path equals the oracle, isolates slots, and its gradients equal those of a dense formula."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from opentinker_kernels import SlotFactors, StackedSlots, group_rows, lora_delta_

# Relative and absolute: the shrunk rows, the delta and the sum are each rounded once to the dtype.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


def assert_equals_oracle(case, out_NO):
    tolerance = TOLERANCE[case.x_NK.dtype]
    torch.testing.assert_close(out_NO.to(case.delta_NO.dtype), case.expected_NO, rtol=tolerance, atol=tolerance)
    base_N = case.groups.slot_of_row_N == -1
    assert torch.equal(out_NO[base_N], case.out_NO[base_N])


@dtypes
def test_own_factors_and_stack_equal_the_oracle(make_random, dtype):
    # oneDNN builds a primitive for each new 16-bit shape: fewer of those.
    for seed in range(120 if dtype == torch.float32 else 40):
        case = make_random(seed, dtype=dtype, max_rows=90)
        assert_equals_oracle(case, lora_delta_(case.out_NO.clone(), case.x_NK, case.own, case.groups))
        assert_equals_oracle(case, lora_delta_(case.out_NO.clone(), case.x_NK, case.stack(), case.groups))


@settings(max_examples=80, deadline=None)
@given(
    slot_of_row=st.lists(st.integers(-1, 4), min_size=1, max_size=60),
    ranks=st.lists(st.one_of(st.none(), st.integers(0, 12)), min_size=4, max_size=4),
    num_in=st.integers(1, 40),
    num_out=st.integers(1, 40),
    seed=st.integers(0, 2**31),
)
def test_any_rows_and_ranks_equal_the_oracle(make, slot_of_row, ranks, num_in, num_out, seed):
    case = make(slot_of_row=slot_of_row, ranks=[*ranks, 3], num_in=num_in, num_out=num_out, seed=seed)
    assert_equals_oracle(case, lora_delta_(case.out_NO.clone(), case.x_NK, case.own, case.groups))
    assert_equals_oracle(case, lora_delta_(case.out_NO.clone(), case.x_NK, case.stack(), case.groups))


@pytest.mark.parametrize(
    "slot_of_row",
    [
        [0] * 6,
        [1, 1, 0, 0, 3, 3],
        [3, 3, 1, 1, 2, 2],
        [-1, 2, 2, 0, 0, -1],
        [0, 1, 2, 3, 3, 3],
        [3, -1, 3, -1, 3, 3],
        [-1] * 6,
    ],
    ids=str,
)
def test_every_layout_of_rows_equals_the_oracle(make, slot_of_row):
    case = make(slot_of_row=slot_of_row, ranks=[4, 4, 2, 7], num_in=24, num_out=40)
    assert_equals_oracle(case, lora_delta_(case.out_NO.clone(), case.x_NK, case.own, case.groups))
    assert_equals_oracle(case, lora_delta_(case.out_NO.clone(), case.x_NK, case.stack(max_rank=9), case.groups))


def test_leading_dimensions_and_columns_of_a_packed_output(make):
    case = make(slot_of_row=[0, 1, 1, -1, 0, 1], ranks=[4, 2], num_in=8, num_out=10)
    packed_NO = torch.cat([torch.zeros(6, 3), case.out_NO, torch.zeros(6, 4)], dim=1)
    lora_delta_(packed_NO[:, 3:13], case.x_NK, case.stack(), case.groups)
    assert_equals_oracle(case, packed_NO[:, 3:13])
    assert packed_NO[:, :3].eq(0).all() and packed_NO[:, 13:].eq(0).all()
    out_BTO, x_BTK = case.out_NO.clone().view(2, 3, 10), case.x_NK.view(2, 3, 8)
    assert_equals_oracle(case, lora_delta_(out_BTO, x_BTK, case.own, case.groups).view(6, 10))


@pytest.mark.parametrize("form", ["own", "stack"])
def test_non_finite_slot_and_rows_do_not_reach_other_rows(make, form):
    slot_of_row = [0, 1, -1, 2, 1, 0, 2, 2]
    case = make(slot_of_row=slot_of_row, ranks=[3, 3, 2], num_in=8, num_out=10)
    clean = lora_delta_(case.out_NO.clone(), case.x_NK, case.own, case.groups)
    case.own[1].A_RK.fill_(float("nan"))
    case.own[1].B_OR.fill_(float("inf"))
    case.x_NK[3] = float("nan")
    weights = case.own if form == "own" else case.stack()
    out = lora_delta_(case.out_NO.clone(), case.x_NK, weights, case.groups)
    touched = torch.tensor([slot == 1 for slot in slot_of_row])
    touched[3] = True
    assert out[touched].isnan().all()
    torch.testing.assert_close(out[~touched], clean[~touched])


def test_slot_of_lower_rank_keeps_nothing_of_its_last_owner():
    stack = StackedSlots(num_slots=2, max_rank=8, in_features=4, out_features=5, dtype=torch.float32)
    stack.write(1, torch.full((8, 4), 7.0), torch.full((5, 8), 7.0), scale=9.0)
    stack.write(1, torch.ones(2, 4), torch.ones(5, 2), scale=0.5)
    assert stack.ranks == [0, 2] and stack.scales == [0.0, 0.5]
    assert stack.A_SRK[1, 2:].eq(0).all() and stack.B_SRO[1, 2:].eq(0).all()
    out = lora_delta_(torch.zeros(2, 5), torch.ones(2, 4), stack, group_rows([1, 0], 2))
    assert out.tolist() == [[4.0] * 5, [0.0] * 5]


def test_a_slot_written_again_is_read_anew_alone_and_in_company():
    stack = StackedSlots(num_slots=3, max_rank=2, in_features=4, out_features=5, dtype=torch.float32)
    for slot_of_row in ([1], [0, 1], [1, 0, 2, 2, 0]):
        groups = group_rows(slot_of_row, 3)
        outs = []
        for rank, scale in ((1, 1.0), (2, 3.0), (0, 7.0)):
            stack.write(1, torch.ones(rank, 4), torch.ones(5, rank), scale=scale)
            outs.append(lora_delta_(torch.zeros(len(slot_of_row), 5), torch.ones(len(slot_of_row), 4), stack, groups))
        row = slot_of_row.index(1)
        assert [out[row, 0].item() for out in outs] == [4.0, 24.0, 0.0]
        assert all(out.sum() == 5 * out[row, 0] for out in outs)


def test_stack_made_in_inference_mode_is_written_and_read_outside_it():
    with torch.inference_mode():
        stack = StackedSlots(num_slots=1, max_rank=2, in_features=4, out_features=5, dtype=torch.float32)
        lora_delta_(torch.zeros(1, 5), torch.ones(1, 4), stack, group_rows([0], 1))
    stack.write(0, torch.ones(2, 4, requires_grad=True), torch.ones(5, 2), scale=1.0)
    assert lora_delta_(torch.zeros(1, 5), torch.ones(1, 4), stack, group_rows([0], 1)).eq(8).all()


def test_factors_that_do_not_fit_are_refused_and_the_slot_keeps_its_own():
    stack = StackedSlots(num_slots=1, max_rank=2, in_features=4, out_features=5, dtype=torch.float32)
    stack.write(0, torch.ones(2, 4), torch.ones(5, 2), scale=1.0)
    for A, B in [((3, 4), (5, 3)), ((2, 3), (5, 2)), ((2, 4), (5, 1)), ((2, 4), (6, 2))]:
        with pytest.raises(ValueError, match="do not fit"):
            stack.write(0, torch.zeros(A), torch.zeros(B), scale=1.0)
    assert stack.ranks == [2] and stack.A_SRK.eq(1).all()
    with pytest.raises(ValueError, match="do not fit"):
        SlotFactors(A_RK=torch.zeros(2, 4), B_OR=torch.zeros(5, 3), scale=1.0)


def test_wrong_rows_dtypes_and_slots_are_refused(make):
    case = make(slot_of_row=[0, 1], ranks=[2, 2], num_in=4, num_out=5)
    with pytest.raises(ValueError, match="2 rows"):
        lora_delta_(case.out_NO[:1].clone(), case.x_NK[:1], case.own, case.groups)
    with pytest.raises(ValueError, match="float16"):
        lora_delta_(case.out_NO.half(), case.x_NK, case.own, case.groups)
    with pytest.raises(ValueError, match="1 slots"):
        lora_delta_(case.out_NO.clone(), case.x_NK, case.own[:1], case.groups)
    with pytest.raises(ValueError, match="inference"):
        lora_delta_(case.out_NO.clone(), case.x_NK.requires_grad_(), case.stack(), case.groups)


def test_different_scales_are_not_rounded_to_bfloat16():
    third = 1 / 3
    own = [SlotFactors(A_RK=torch.ones(1, 1), B_OR=torch.ones(1, 1), scale=s * third) for s in (1, 2)]
    x = torch.full((2, 1), 3.0, dtype=torch.bfloat16)
    out = lora_delta_(torch.zeros(2, 1, dtype=torch.bfloat16), x, own, group_rows([0, 1], 2))
    assert out.flatten().tolist() == [1.0, 2.0]


# --- gradients ---------------------------------------------------------------------------------------------


def dense_output(case, x_NK, out_NO, factors):
    """Every row through its own dense matrix scale * B A: shares no code with the path under test."""
    rows = []
    for n, slot in enumerate(case.groups.slot_of_row_N.tolist()):
        row = out_NO[n]
        if slot >= 0 and factors[slot] is not None:
            A, B = factors[slot]
            row = row + (case.own[slot].scale * (B @ A)) @ x_NK[n]
        rows.append(row)
    return torch.stack(rows)


def leaves(case):
    x_NK, out_NO = case.x_NK.clone().requires_grad_(), case.out_NO.clone().requires_grad_()
    factors = [
        None if own is None else (own.A_RK.clone().requires_grad_(), own.B_OR.clone().requires_grad_())
        for own in case.own
    ]
    return x_NK, out_NO, factors


def as_weights(case, factors):
    return [
        None if pair is None else SlotFactors(A_RK=pair[0], B_OR=pair[1], scale=own.scale)
        for pair, own in zip(factors, case.own, strict=True)
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_gradients_equal_dense_autograd(make_random, dtype):
    tolerance = {torch.float64: 1e-10, torch.float32: 2e-4}[dtype]
    for seed in range(60):
        case = make_random(seed, dtype=dtype, max_rows=60)
        probe_NO = torch.randn(case.out_NO.shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))
        grads = []
        for path in ("grouped", "dense"):
            x_NK, out_NO, factors = leaves(case)
            if path == "grouped":
                y_NO = lora_delta_(out_NO * 1.0, x_NK, as_weights(case, factors), case.groups)
            else:
                y_NO = dense_output(case, x_NK, out_NO, factors)
            (y_NO * probe_NO).sum().backward()
            flat = [x_NK.grad, out_NO.grad, *(t.grad for pair in factors if pair is not None for t in pair)]
            grads.append(flat)
        for got, expected in zip(*grads, strict=True):
            assert (got is None) == (expected is None)
            if expected is not None:
                torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def test_gradcheck_over_mixed_ranks_scattered_rows_and_a_slot_without_factors(make):
    case = make(slot_of_row=[2, 0, -1, 1, 0, 3, 0], ranks=[2, 3, 1, None], num_in=4, num_out=3, dtype=torch.float64)
    x_NK, out_NO, factors = leaves(case)
    flat = [t for pair in factors if pair is not None for t in pair]

    def function(x, out, *flat):
        pairs = iter(zip(flat[::2], flat[1::2], strict=True))
        weights = as_weights(case, [None if pair is None else next(pairs) for pair in factors])
        return lora_delta_(out * 1.0, x, weights, case.groups)

    assert torch.autograd.gradcheck(function, (x_NK, out_NO, *flat))


def test_mixed_batch_touches_only_slots_with_rows_and_each_gets_its_own_gradient(make):
    slot_of_row = [0, 2, 0, -1, 2, 2, 0, 0]
    case = make(slot_of_row=slot_of_row, ranks=[3, 3, 5], num_in=6, num_out=7, dtype=torch.float64)
    x_NK, _, factors = leaves(case)
    lora_delta_(case.out_NO.clone(), x_NK, as_weights(case, factors), case.groups).square().sum().backward()
    assert factors[1][0].grad is None and factors[1][1].grad is None
    for slot in (0, 2):
        alone = torch.tensor([other == slot for other in slot_of_row])
        A, B = (t.detach().clone().requires_grad_() for t in factors[slot])
        weights = [SlotFactors(A_RK=A, B_OR=B, scale=case.own[slot].scale)]
        groups = group_rows([0] * int(alone.sum()), 1)
        lora_delta_(case.out_NO[alone].clone(), case.x_NK[alone], weights, groups).square().sum().backward()
        torch.testing.assert_close(factors[slot][0].grad, A.grad, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(factors[slot][1].grad, B.grad, rtol=1e-10, atol=1e-10)


def test_rows_whose_slots_have_no_factors_pass_through_without_a_node(make):
    case = make(slot_of_row=[0, -1], ranks=[None, 2], num_in=4, num_out=5)
    x_NK = case.x_NK.requires_grad_()
    out_NO = lora_delta_(case.out_NO.clone(), x_NK, case.own, case.groups)
    assert out_NO.grad_fn is None and torch.equal(out_NO, case.out_NO)


def test_frozen_factors_and_inputs_get_no_gradient(make):
    case = make(slot_of_row=[0, 1, 1], ranks=[2, 2], num_in=4, num_out=5)
    _, _, factors = leaves(case)
    factors[0][0].requires_grad_(False)
    factors[1][1].requires_grad_(False)
    lora_delta_(case.out_NO.clone(), case.x_NK, as_weights(case, factors), case.groups).sum().backward()
    assert factors[0][0].grad is None and factors[1][1].grad is None
    assert factors[0][1].grad is not None and factors[1][0].grad is not None
    assert case.x_NK.grad is None


def test_float32_factors_over_bfloat16_rows_get_float32_gradients(make_random):
    for seed in range(20):
        case = make_random(seed, dtype=torch.float32, max_rows=60)
        grads = []
        for dtype in (torch.bfloat16, torch.float32):
            _, _, factors = leaves(case)
            x, out = case.x_NK.bfloat16().to(dtype), case.out_NO.to(dtype)
            y = lora_delta_(out.clone(), x, as_weights(case, factors), case.groups)
            if y.requires_grad:
                y.float().sum().backward()
            grads.append([t.grad for pair in factors if pair is not None for t in pair])
        for got, expected in zip(*grads, strict=True):
            assert (got is None) == (expected is None)
            if expected is not None:
                assert got.dtype == torch.float32
                scale = expected.abs().max().clamp_min(1e-3)
                assert ((got - expected).abs().max() / scale) < 4e-2


def test_factor_changed_in_place_between_forward_and_backward_is_noticed(make):
    case = make(slot_of_row=[0, 0], ranks=[2], num_in=4, num_out=5)
    x_NK, _, factors = leaves(case)
    y_NO = lora_delta_(case.out_NO.clone(), x_NK, as_weights(case, factors), case.groups)
    with torch.no_grad():
        factors[0][1].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y_NO.sum().backward()


def test_result_does_not_depend_on_company_beyond_rounding(make):
    slot_of_row = [0, 1, 2, 1, -1, 2, 2, 0]
    case = make(slot_of_row=slot_of_row, ranks=[3, 4, 5], num_in=16, num_out=20)
    mixed = lora_delta_(case.out_NO.clone(), case.x_NK, case.own, case.groups)
    for n, slot in enumerate(slot_of_row):
        row = slice(n, n + 1)
        alone = lora_delta_(case.out_NO[row].clone(), case.x_NK[row], case.own, group_rows([slot], 3))
        torch.testing.assert_close(mixed[row], alone, rtol=1e-5, atol=1e-5)
