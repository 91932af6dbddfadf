"""Questions that are better answered before a run than by it: will it fit, will anything be learnt."""
