"""Looking at runs: curves, claims, pages, tokens, replay."""
