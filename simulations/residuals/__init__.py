"""What residuals cost and give back, by replay and in runs whose process is killed: `measure residuals`."""
