"""Train a domain: one plain loop, its schedules, evaluation and snapshots."""
