"""Grouped low-rank deltas over token rows that belong to different slots.

The package knows rows and slots only: a row is one token's activation, a slot holds one pair of low-rank
factors. Importing it needs neither a GPU nor Triton.

A step groups its rows once and every adapted linear shares the result:

    groups = group_rows(slot_of_row, num_slots)     # -1: a row without a slot, its output stays as it is
    out_NO = torch.nn.functional.linear(x_NK, weight_OK)
    out_NO = lora_delta_(out_NO, x_NK, weights, groups)
"""

from opentinker_kernels.batched import FactorGradients
from opentinker_kernels.dispatch import lora_delta_, lora_linear
from opentinker_kernels.grouping import RowGroups, group_rows
from opentinker_kernels.reference import lora_delta_reference
from opentinker_kernels.weights import SlotFactors, StackedSlots

__all__ = [
    "FactorGradients",
    "RowGroups",
    "SlotFactors",
    "StackedSlots",
    "group_rows",
    "lora_delta_",
    "lora_delta_reference",
    "lora_linear",
]
