"""Watching MoE layers: load, routers and experts, in our layers and in those of transformers.

monitor.py   MoEMonitor
layer.py     what it wants of a layer; layers.py, huggingface.py: ours, and those of transformers
counters.py  what is counted on the device
reading.py   metrics, and how they follow from what was counted
writers.py   JSON lines, TensorBoard, Prometheus, PNG, terminal
alarms.py    thresholds
reinit.py    collapsed experts drawn anew
heat_map.py, terminal.py: what writers draw
"""

from .alarms import Alarm, Alert
from .monitor import MoEMonitor
from .reading import PER_EXPERT, SCALARS, LayerReading, Reading
from .reinit import reinit_experts
from .writers import Figure, JsonLines, Prometheus, TensorBoard, Terminal, Writer

__all__ = [
    "PER_EXPERT",
    "SCALARS",
    "Alarm",
    "Alert",
    "Figure",
    "JsonLines",
    "LayerReading",
    "MoEMonitor",
    "Prometheus",
    "Reading",
    "TensorBoard",
    "Terminal",
    "Writer",
    "reinit_experts",
]
