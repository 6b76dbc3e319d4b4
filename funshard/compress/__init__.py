"""Gradient compression: what is sent in the place of each unit's gradients, with its state passed along."""

from .._gone import raise_gone
from ._compressors import Compressor, exact, powersgd, quantize, switch

__all__ = ["Compressor", "exact", "powersgd", "quantize", "switch"]

__getattr__ = raise_gone(__name__)
