"""Memory: the modes a policy is held in, the plan that says what fits, and the back-off when it did not."""
