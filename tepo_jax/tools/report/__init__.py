"""Reports on runs and evaluations: tables, figures, HTML pages, replay."""
