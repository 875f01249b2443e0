"""Train what a domain owns: one plain loop, its schedules, evaluation and snapshots."""
