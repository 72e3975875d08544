"""What makes a plan fit: values computed again, in parts, or kept by the host."""
