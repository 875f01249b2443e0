"""Run a domain outside this library: `torch.export`, ONNX, or a plain state dict."""
