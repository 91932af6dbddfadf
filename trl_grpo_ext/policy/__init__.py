"""The policy a run is given: how it is held, which adapter it trains, what it is measured against."""
