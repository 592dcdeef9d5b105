"""Looking at runs and evaluations: statistics, tables, pages, replay."""
