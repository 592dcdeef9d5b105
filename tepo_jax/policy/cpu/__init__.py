"""Forms of the policy's operations that only a CPU needs."""
