"""What every verb shares: exit codes, signals, log, progress, reports."""
