"""About runs and machines, not about the paper: plan, benchmark, report."""
