"""Random cases of the grouped delta, and the Triton kernels in the interpreter.

Without CUDA the kernels are imported here under TRITON_INTERPRET=1: Triton reads it when a kernel is
decorated. Triton itself is imported before, and the setting is taken back at once, so that nothing else in
this process and no process started by a test sees it.
"""

import importlib.util
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from opentinker_kernels import RowGroups, SlotFactors, StackedSlots, group_rows, lora_delta_reference

if importlib.util.find_spec("triton") is not None and not torch.cuda.is_available():
    import triton.language  # noqa: F401

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        from opentinker_kernels import triton_kernels
    assert triton_kernels.is_interpreted(), "something imported the kernels before the interpreter was set"


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """One adapted linear, its rows, and the delta that the oracle finds for them."""

    x_NK: torch.Tensor
    out_NO: torch.Tensor
    own: list[SlotFactors | None]
    groups: RowGroups

    @property
    def delta_NO(self) -> torch.Tensor:
        return lora_delta_reference(
            self.x_NK,
            [None if own is None else own.A_RK for own in self.own],
            [None if own is None else own.B_OR for own in self.own],
            [0.0 if own is None else own.scale for own in self.own],
            self.groups,
        )

    @property
    def expected_NO(self) -> torch.Tensor:
        return self.out_NO.to(self.delta_NO.dtype) + self.delta_NO

    def stack(self, *, max_rank: int | None = None, dirty: bool = True) -> StackedSlots:
        """The factors in a stack whose slots had another owner of full rank before, if `dirty`."""
        num_in, num_out = self.x_NK.shape[1], self.out_NO.shape[1]
        max_rank = max_rank or max([1, *(own.A_RK.shape[0] for own in self.own if own is not None)])
        stack = StackedSlots(
            num_slots=len(self.own),
            max_rank=max_rank,
            in_features=num_in,
            out_features=num_out,
            dtype=self.x_NK.dtype,
            device=self.x_NK.device,
        )
        for slot, own in enumerate(self.own):
            if dirty:
                residue = torch.full((max_rank, 1), float("nan"))
                stack.write(slot, residue.expand(-1, num_in), residue.t().expand(num_out, -1), scale=float("nan"))
                stack.clear(slot)
            if own is not None:
                stack.write(slot, own.A_RK, own.B_OR, scale=own.scale)
        return stack


def make_case(
    *,
    slot_of_row: list[int],
    ranks: list[int | None],
    num_in: int,
    num_out: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    device: str = "cpu",
) -> Case:
    """Random case; a rank of None is a slot without factors. Values are of order one in x, out and delta."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * std).to(device=device, dtype=dtype)

    return Case(
        x_NK=normal(len(slot_of_row), num_in),
        out_NO=normal(len(slot_of_row), num_out),
        own=[
            None
            if rank is None
            else SlotFactors(
                A_RK=normal(rank, num_in, std=num_in**-0.5),
                B_OR=normal(num_out, rank, std=max(rank, 1) ** -0.5),
                scale=0.5 + 0.3 * slot,
            )
            for slot, rank in enumerate(ranks)
        ],
        groups=group_rows(slot_of_row, len(ranks), device=device),
    )


def random_case(seed: int, *, dtype: torch.dtype, device: str = "cpu", max_rows: int = 40) -> Case:
    """Case with random ranks, slots, row order, base-only rows, empty groups and odd sizes."""
    rng = random.Random(seed)
    num_slots = rng.choice([1, 2, 3, 5, 8])
    used = [-1, *rng.sample(range(num_slots), rng.randint(1, num_slots))]
    slot_of_row = rng.choices(used, k=rng.randint(1, max_rows))
    if rng.random() < 0.3:
        slot_of_row.sort(key=lambda slot: (slot * 7) % 5)
    return make_case(
        slot_of_row=slot_of_row,
        ranks=[rng.choice([None, 1, 3, 8, 16, 17, 33]) for _ in range(num_slots - 1)] + [rng.randint(1, 20)],
        num_in=rng.choice([1, 16, 63, 64, 65, 100, 130]),
        num_out=rng.choice([1, 16, 48, 127, 128, 129, 200]),
        dtype=dtype,
        seed=seed,
        device=device,
    )


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The tensors are small: a second thread would only wait, badly so on a busy machine."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def make() -> Callable[..., Case]:
    return make_case


@pytest.fixture(scope="session")
def make_random() -> Callable[..., Case]:
    return random_case
