"""ErrorFeedback: quantized pseudo-gradients that lose nothing in the long run."""

from __future__ import annotations

from .._errors import InvalidArgument
from .._quant import Quant, quant_of
from ._member_errors import MemberErrors


class ErrorFeedback(MemberErrors):
    """Quantized pseudo-gradients with error feedback, as `quantize` of `DiLoCo` and its kin.

        feedback = lh.torch.ErrorFeedback("int4")
        with lh.torch.DiLoCo(comm, model, inner, outer, sync_every=100, quantize=feedback) as diloco:
            ...

    What a pseudo-gradient loses when it is encoded is this member's **error**. It is added to the member's next
    pseudo-gradient, so nothing is lost in the long run (Karimireddy et al., "Error Feedback Fixes SignSGD and other
    Gradient Compression Schemes", 2019). The host that adds up a part keeps the error of the sum, too.

    quantize: "bf16", "int8", "int4" or a longhaul.Quant; the same at all members. Not "auto".

    Errors belong to the member: they are not part of `diloco.state`, and a newcomer begins with errors of zero. Put
    state_dict() into the member's own checkpoint. An error changes only when the op has ended well; after Aborted,
    Evicted, Unavailable or a timeout it is as before.

    Memory: float32 errors, as many as there are parameters, in the process. One object is for one DiLoCo; a second DiLoCo
    that is given it raises InvalidArgument. Not thread-safe: the thread that makes the inner steps uses it.
    """

    def __init__(self, quantize: str | Quant) -> None:
        quant = quant_of(quantize)
        if quant is None or quant.codec == "auto":
            raise InvalidArgument(f'quantize is {quantize!r}; give "bf16", "int8", "int4" or a longhaul.Quant of these')
        self.quantize = quant

    def __repr__(self) -> str:
        return f"ErrorFeedback({self.quantize!r})"
