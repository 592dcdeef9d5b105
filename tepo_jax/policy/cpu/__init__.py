"""Forms of operations that only a CPU needs."""
