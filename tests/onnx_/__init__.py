"""Models of ONNX."""
