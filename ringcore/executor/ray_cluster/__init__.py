"""Workers on the hosts of a Ray cluster: Ray finds the hosts and starts an agent on each, which joins the engine as
those of `ringcore worker` do. What engine and workers say to each other does not pass through Ray.

Only this package and `batch/on_ray/` import Ray, whose extra is `ray`.
"""
