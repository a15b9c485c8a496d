"""Our layers in the place of a model's own where they compute the same."""
