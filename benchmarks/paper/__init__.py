"""The paper's tables and figures on real data: ``python -m benchmarks.paper quick``."""
