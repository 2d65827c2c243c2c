"""What people see of a run: where the seconds went, what was measured, what the trees look like.

    train.py ──► Spans ──────────┐
                                 ├─► MetricsWriter ─► metrics.jsonl, tensorboard/ ─┐
                 values by tag ──┤                                                 ├─► report.html
                                 └─► Console                                       │
                 trees, credits ──► save_trees, TurnNotes ─► trees/ ───────────────┴─► treeopsd show

`RunFolder` owns the folder while a run writes to it; `RunPaths` names the files in it for everyone who only reads.
Nothing here touches the model: the package imports `tree` and `config` only.
"""
