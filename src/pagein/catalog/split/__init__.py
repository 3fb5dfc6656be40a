"""Split models as they lie on a disk: plan, names, folder. Pure, and free of torch: daemon and workers read them."""
