"""Gradient compression: what is sent in the place of each unit's gradients, with its state passed along."""

from ._compressors import Compressor, cast, exact, post_local, quantize, switch, unreduced
from ._powersgd import PowerSGD, powersgd

__all__ = ["Compressor", "PowerSGD", "cast", "exact", "post_local", "powersgd", "quantize", "switch", "unreduced"]
