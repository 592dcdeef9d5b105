"""From prompts to graded completions."""
