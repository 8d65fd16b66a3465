"""Fused linear Jensen-Shannon divergence as a module."""

from torch import nn

from liger_kernel.ops import LigerFusedLinearJSDFunction


class LigerFusedLinearJSD(nn.Module):
    """The divergence of a teacher's head from a student's; see LigerFusedLinearJSDFunction. Raises AssertionError where
    the temperature is 0."""

    def __init__(self, jsd_beta=0.5, ignore_index=-100, temperature=1.0, accum_dtype=None):
        super().__init__()
        if temperature == 0:
            raise AssertionError("temperature must not be 0")
        self.jsd_beta, self.ignore_index, self.temperature, self.accum_dtype = (
            jsd_beta,
            ignore_index,
            temperature,
            accum_dtype,
        )

    def forward(self, student_input, student_weight, teacher_input, teacher_weight, shift_labels):
        return LigerFusedLinearJSDFunction.apply(
            student_input,
            student_weight,
            teacher_input,
            teacher_weight,
            shift_labels,
            self.jsd_beta,
            self.ignore_index,
            self.temperature,
            self.accum_dtype,
        )
