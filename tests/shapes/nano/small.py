batch_size, max_iters = 8, 4
