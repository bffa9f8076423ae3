"""Compiles a traced graph to one that the library runs, pass by pass."""

from __future__ import annotations

from sylvan.kernels.native.graph import Graph
from sylvan.kernels.native.layout import ProgramLayout, plan_memory
from sylvan.kernels.native.quantise import fuse_quantise, quantise_rows
from sylvan.kernels.native.weight_file import PackedWeightFile
from sylvan.kernels.native.weights import pack_weights


def compile_graph(graph: Graph, kept: PackedWeightFile | None = None) -> ProgramLayout:
    """Pack the weights, quantise the inputs of quantised matrices, and plan memory.

    Args:
        graph: The traced graph.
        kept: Cache of packed weights; receives newly packed ones.

    Raises:
        Unsupported: see `pack_weights`.
    """
    return plan_memory(fuse_quantise(quantise_rows(pack_weights(graph, kept))))
