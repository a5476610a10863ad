"""Training programs that oeprov brings: the built-in click models."""
