"""One frozen backbone, many domains: sites, routing, mixed batches, merging, files."""
