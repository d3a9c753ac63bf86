"""Cost models: seconds, FLOPs and workspace of one run of an op."""

from fxckpt.costs.models import CostModel, FlopCost, MeasuredCost
from fxckpt.costs.roofline import DeviceRoofline, Roofline

__all__ = ["CostModel", "DeviceRoofline", "FlopCost", "MeasuredCost", "Roofline"]
