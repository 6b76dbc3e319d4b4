"""int8, nf4, dynamic8: values in blocks, each with the largest absolute value in it as its scale; cast: in another dtype.

For `P(at_rest=...)` and `Precision`; `optim.quantized_state` keeps optimizer states in them.

Pure pairs of functions on 1-D tensors, as `Codec` wants them: a slice of any length, empty ones too, in any floating point
dtype from 16 bits on. What is zero stays exactly zero. What int8 and nf4 have decoded is encoded to the same bytes again (not
where scales are quantized, too). A block in which a value is infinite or NaN is NaN as a whole: nothing is hidden.
"""

from .._gone import raise_gone
from ._codecs import cast, dynamic8, int8, nf4

__all__ = ["cast", "dynamic8", "int8", "nf4"]

__getattr__ = raise_gone(__name__)
