"""Long studies of hooks and strategies, whose figures the notebooks show, with their results beside them."""
