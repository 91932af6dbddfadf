"""Run scripts that were written for TRL's PPOTrainer, of both eras, on the group-relative trainer."""
