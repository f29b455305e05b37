"""Graphs as files that other programs read: tables, DOT, ONNX, Excel, HTML, traces. Computes no cost of its own.

One room per format; each takes a `GraphView` and returns text or bytes, or writes one file. What a format needs beyond
the core install it says where it is missing.
"""

from __future__ import annotations

from results.graph_export.view import GraphView

__all__ = ["GraphView"]
