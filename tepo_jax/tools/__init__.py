"""Programs about runs and machines: plan, benchmark, report."""
