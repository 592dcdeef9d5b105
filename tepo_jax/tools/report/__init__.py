"""Looking at runs and evaluations: tables, figures, pages, replay."""
