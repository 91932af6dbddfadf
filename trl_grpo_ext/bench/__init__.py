"""The comparison with TRL: the same job on ``trl.GRPOTrainer`` and on ours, step against step."""
