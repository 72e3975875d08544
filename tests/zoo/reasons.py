"""Why a call that looks wrong is right: reasons by class, as patterns of the callable, its argument and the mistake.

Some reasons need no table, since `judge.py` finds them: "asked again" (the same call twice), "has a default" (an
argument is left out), "optional" (None, and the annotation says so), "in its range" (the annotation says which numbers
are meant, and this is one), and "computes" (what was made are nodes that run and are of the types that they say:
broadcasting, promotion, any rank).
"""

Row = tuple[str, str, str]  # patterns of the callable, the argument and the class of the mistake

NODES = ("rank: *", "shape*", "dtype: *", "another graph")  # other nodes, as good as the one in the example

RIGHT: dict[str, list[Row]] = {
    "any JSON is data of the user's": [("ht.Checkpoints.save", "extra", "range: no such")],
    "any text is a name": [("*", "name", "kind: text"), ("*", "name", "range: no such")],
    "any text is a text": [
        ("ht.data.*.encode", "text", "range: no such"),
        ("ht.data.BytePairs.train", "text", "range: no such"),
        ("ht.data.TextData.of", "string", "range: no such"),
        ("ht.data.TextData", "vocabulary", "range: no such"),
        ("ht.look.curves_svg", "label", "range: no such"),
        ("ht.look.curves_svg", "up", "range: no such"),
        ("ht.script.Script", "about", "range: no such"),
        ("ht.errors.*", "message", "range: no such"),
        ("ht.errors.*", "fix", "range: no such"),
        ("ht.errors.did_you_mean", "name", "range: no such"),
        ("ht.plan.MachineProfile", "host", "range: no such"),
        ("ht.ps.Options", "token", "range: no such"),
        ("ht.data.hashed", "field", "range: no such"),
        ("ht.ps.Growth.rows", "table", "range: no such"),
        ("ht.automl.Trial", "error", "range: no such"),
        ("ht.automl.Trial", "worker", "range: no such"),
        ("ht.automl.search", "task", "range: no such"),
    ],
    "any text or whole number has an id": [
        ("ht.data.hashed", "values", "kind: text"),
        ("ht.data.hashed", "values", "rank: number"),
        ("ht.data.hashed", "values", "shape: longer"),
        ("ht.data.hashed", "values", "shape: empty"),
    ],
    "any node may be looked at": [
        *(("ht.summary", "outputs", kind) for kind in NODES),
        *(("ht.look.*", "outputs", kind) for kind in NODES),
        *(("ht.look.cuda_text", "node", kind) for kind in NODES),
        *(("ht.plan.MachineProfile.*", "node", kind) for kind in NODES),
    ],
    "any number of them": [
        *(
            (label, argument, f"shape: {kind}")
            for label, argument in (
                ("ht.automl.*", "trials"),
                ("ht.data.LengthLoader", "columns"),
                ("ht.ml.*", "X"),
                ("ht.ml.*.text", "names"),
                ("ht.automl.Auto*", "categorical"),
                ("ht.Executor", "subgraphs"),
                ("ht.embed.Weights", "shape"),
                ("ht.State", "variables"),
                ("ht.Graph", "outputs"),
                ("ht.Profile", "instructions"),
                ("ht.rewrite", "outputs"),
                ("ht.gradients", "wrt"),
                ("ht.check_gradients", "inputs"),
                ("ht.fit", "loader"),
                ("ht.look.*_svg", "rows"),
                ("ht.look.*_svg", "points"),
                ("ht.look.*_svg", "steps"),
                ("ht.look.explained", "outputs"),
                ("ht.look.find_rate", "loader"),
                ("ht.data.BytePairs", "merges"),
                ("ht.data.BytePairs.train", "names"),
                ("ht.data.*.decode", "*"),
                ("ht.data.BytePairs.decode_bytes", "ids"),
                ("ht.data.DataLoader", "transform"),
                ("ht.data.packed", "rows"),
                ("ht.data.GraphPart.places", "ids"),
                ("ht.data.GraphPart.of", "edges"),
                ("ht.data.GraphPart.of", "owners"),
                ("ht.data.GraphPart", "edges"),
                ("ht.dist.ExpertParallel", "hosts"),
                ("ht.dist.Schedule", "lists"),
                ("ht.dist.Layout.pieces", "shape"),
                ("ht.data.TextData", "codes"),
                ("ht.data.NeighborLoader", "edges"),
                ("ht.data.NeighborLoader", "fanouts"),
                ("ht.data.adjacency", "edges"),
                ("ht.data.partition", "edges"),
                ("ht.data.sliding_windows", "series"),
                ("ht.data.standardized", "*"),
                ("ht.schedules.multistep", "milestones"),
                ("ht.script.Script", "without"),
                ("ht.script.Script.parse", "arguments"),
                ("ht.dist.Strategy", "*"),
                ("ht.optim.update_rule", "states"),
                ("ht.dist.Parallel", "hosts"),
                ("ht.dist.Pipeline", "hosts"),
                ("ht.strategies.AllReduce", "hosts"),
                ("ht.dist.Layout", "ratio"),
                ("ht.dist.RuleBook", "must_fit"),
                ("ht.dist.Redistribution", "collectives"),
                ("ht.plan.Why", "rated"),
                ("ht.plan.Why", "tried"),
                ("ht.automl.Space.places", "configs"),
                ("ht.plan.Timeline", "events"),
                ("ht.plan.simulate", "entries"),
                ("ht.dist.rehearse", "entries"),
                ("ht.plan.trace", "entries"),
                ("ht.plan.trial", "entries"),
                ("ht.plan.Cluster", "hosts"),
                ("ht.plan.Cluster.link", "ranks"),
                ("ht.plan.Table", "points"),
                ("ht.ps.Options", "inherit"),
                ("ht.ps.Options", "imports"),
                ("ht.ps.hot_rows", "batches"),
                ("ht.ps.Placed", "replicas"),
                ("ht.ps.Placed.*", "*"),
                ("ht.strategies.Hybrid.build", "outputs"),
            )
            for kind in ("empty", "longer")
        ),
        *(("ht.plan.simulate", "entries", f"shape: {kind}") for kind in ("empty", "longer")),
    ],
    "an edge, a node or a code that is given twice counts twice": [
        ("ht.data.GraphPart", "edges", "shape"),
        ("ht.data.GraphPart", "edges", "range: huge"),  # of none
        ("ht.data.GraphPart.places", "ids", "shape"),
        ("ht.data.TextData", "codes", "shape*"),
    ],
    "any shape is a shape": [
        ("ht.generation.chosen", "logits", "shape"),
        ("ht.init.*", "shape", "shape: *"),
        ("ht.strategies.Choice", "shape", "shape: *"),
        ("ht.dist.Redistribution", "shape", "shape: *"),
        ("ht.data.masked_words", "ids", "*shape*"),
        ("ht.data.masked_words", "ids", "rank: *"),
        ("ht.data.GraphPart.places", "ids", "rank: *"),
        ("ht.ps.Placed.*", "*", "rank: *"),
        ("ht.ps.Placed*", "*", "shape"),
        ("ht.ps.partition_bigraph", "ids", "shape"),
        ("ht.data.BytePairs.decode*", "ids", "shape*"),
        ("ht.data.TextData.decode", "codes", "shape*"),
    ],
    "patterns may fit no variable of a model, and `build` says so": [
        ("ht.dist.*", "split", "range: no such"),
        ("ht.dist.*", "experts", "range: no such"),
        ("ht.dist.RuleBook*", "patterns", "range: no such"),
        ("ht.dist.RuleBook*", "must_fit", "range: no such"),
        ("ht.dist.RuleBook*", "must_fit", "kind: of foreign"),  # of a mapping, whose names are what counts
        ("ht.strategies.Hybrid", "served", "*"),
        ("ht.strategies.*", "pooled", "*"),
        ("ht.ps.Cache.capacity", "table", "range: no such"),
    ],
    "rows as any others": [
        ("ht.Predictor.__call__", "x", "shape*"),
        *(("ht.from_torch", "inputs", mistake) for mistake in ("shape: longer", "kind: of none")),
        ("ht.ml.*", "X", "shape"),
        *((f"ht.automl.{name}.*", "x", "shape") for name in ("Forest", "GaussianProcess")),
        *((f"ht.automl.{name}.*", "y", "rank: more") for name in ("Forest", "GaussianProcess")),  # a column is a vector
        ("ht.ml.*", "y", "rank: more"),
        ("ht.automl.Auto*", "X", "shape"),
        ("ht.automl.Auto*", "y", "rank: more"),
        ("ht.automl.Auto*.fit", "X", "foreign: texts"),  # columns of words
    ],
    "either number may be the other": [("ht.ml.*", "max_features", "order"), ("ht.ml.*", "max_leaf_nodes", "order")],
    "numbers as any others": [
        (f"ht.ml.{name}", "X", kind)
        for name in ("ALSRecommender.*", "LatentDirichletAllocation.*")
        for kind in ("dtype: floats", "range: huge")
    ],
    "there for pipelines, which give y to all": [
        ("ht.ml.ALSRecommender.*", "y", "kind: *"),
        ("ht.ml.Clusterer.*", "y", "kind: *"),
        ("ht.ml.GaussianMixture.*", "y", "kind: *"),
        ("ht.ml.KMeans.*", "y", "kind: *"),
        ("ht.ml.LatentDirichletAllocation.*", "y", "kind: *"),
        ("ht.ml.NMF.*", "y", "kind: *"),
        ("ht.ml.PCA.*", "y", "kind: *"),
        ("ht.ml.Transformer.*", "y", "kind: *"),
    ],
    "a weight for all rows": [
        ("ht.ml.*", "sample_weight", "kind: number"),
        ("ht.ml.*", "sample_weight", "rank: number"),
    ],
    "told when it is fitted, which knows rows and ranks": [
        ("ht.ml.*", "strategy", "kind: *"),
        ("ht.ml.KMeans", "init", "kind: number"),
        ("ht.ml.KMeans", "init", "rank: list"),
    ],
    "the range of the parameter holds it": [("ht.ml.Estimator.set_params", "tol", "range: huge")],
    "any values are options, and a configuration has those": [
        ("ht.automl.Categorical", "options", "*"),
        ("ht.automl.*", "config", "kind: of foreign"),
        ("ht.automl.*", "config", "range: no such"),
    ],
    "a place beyond the ends is the end": [("ht.automl.*.at", "place", kind) for kind in ("range: *", "sign")],
    "told by `propose`, which knows the names": [("ht.automl.Alternating", "first", "shape*")],
    "a number for all, or one a channel": [
        ("ht.data.Normalize", "*", "rank: list"),
        ("ht.data.Normalize", "*", "sign"),
        ("ht.data.Normalize", "*", "range: huge"),
    ],
    "values to average, of which NaN is none the less one": [("ht.metrics.Mean.update", "values", "*")],
    "objects of any kind are data, of which a transform may make numbers": [
        ("ht.data.ArrayDataset", "arrays", "kind: of *")
    ],
    "anything marks a node": [("ht.tagged", "*", "*")],
    "what can be called is called, a class too": [
        ("ht.op", "forward", "kind: class"),
        ("ht.recompute", "function", "kind: class"),
        ("ht.script.told", "make", "kind: class"),
    ],
    "whatever makes values, but has no law to tell": [("ht.init.law_of", "init", "kind: *")],
    "any number of places, NaN where a name is not active": [
        ("ht.automl.Space.vectors", "places", "nan"),
        ("ht.automl.Space.vectors", "places", "shape"),
        ("ht.automl.Space.vectors", "places", "shape: empty"),
    ],
    "a number is a value": [
        ("ht.Predictor.__call__", "x", "nan"),
        ("ht.evaluate", "node", "nan"),
        ("ht.embed.Weights", "init", "kind: number"),
        ("ht.check_gradients", "inputs", "rank: number"),
        ("ht.data.standardized", "values", "rank: number"),
        ("ht.dist.place", "ranks", "rank: number"),
    ],
    "the name may be left out": [("ht.Executor.run", "name", "order"), ("ht.profile", "name", "order")],
    "looked at by strategies alone, of which there is none": [("ht.Executor.run", "ahead", "kind: *")],
    "ids that are no words are left as they are": [("ht.data.masked_words", "ids", "range: huge")],
    "others than the one that is asked for": [
        ("ht.schedules.Plateau.update", "state", "range: no such"),
        ("ht.embed.Embedding.*", "state", "range: no such"),
    ],
    "layers that follow each other in any order": [("ht.nn.Sequential", "layers", "order")],
    "a path that will be written": [
        ("ht.fit", "best", "kind: text"),
        ("ht.automl.*", "log", "kind: text"),
        ("ht.plan.trial", "log", "kind: text"),
        ("ht.ps.Options", "snapshots", "range: no such"),
        ("ht.ps.Options", "key_file", "range: no such"),
    ],
}

# Reasons why a call may also end in an error of Python's.
RAW: dict[str, list[Row]] = {
    "endless": [("ht.fit", "epochs", "range: huge")],
    "the function that is given fails": [("ht.generation.beam_search", "first", "range: zero")],
    "called by hetu itself, at every step or to tell of a mistake": [
        ("ht.Executor.fill", "*", "*"),
        ("ht.dist.ThreadComm*", "*", "*"),
        ("ht.Executor.compiled", "*", "*"),
        ("ht.State.add", "*", "*"),
        ("ht.errors.*", "*", "*"),
    ],
}
