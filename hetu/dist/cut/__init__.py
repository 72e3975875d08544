"""From a strategy to the graph of one rank.

`kept` and `strategy` are plain data, which `builders` and `heterogeneous` write and `regroup` carries over to other
groups of ranks; `place` puts parts of a model on ranks of their own. `rewrites`, `partition` and `bucket`, which joins
collectives (`under_way`), make the graph of a rank, which `on_ranks` gives to an executor.

A pipeline does the same with eight files, in this order: `pipeline_schedule` (when which pass runs), `pipeline_stages`
(which node is on which stage), `pipeline_strategy` (the plain data), `pipeline_builder` (writes it), `pipeline_layouts`
(how values lie over micro-batches), `pipeline_walk` and `pipeline_batches` (through the schedule) and `pipeline_step`
(the graph of one rank).
"""

from . import pipeline_step  # registers how a strategy with stages is cut
