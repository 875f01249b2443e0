"""Every system the paper compares, as a short recipe, and `adapt`, which runs any of them."""
