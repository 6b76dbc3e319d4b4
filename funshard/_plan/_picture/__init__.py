"""The picture of a plan, as an SVG file: `picture.draw_plan`, and the parts that it consists of."""
