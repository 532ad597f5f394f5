"""Colours of the room, RGB in [0, 1], and the numbers of its materials."""

BALL_COLOURS: tuple[tuple[float, float, float], ...] = (
    (0.95, 0.10, 0.10),
    (0.10, 0.80, 0.15),
    (0.10, 0.20, 0.95),
    (0.98, 0.88, 0.10),
    (0.90, 0.15, 0.85),
    (0.10, 0.85, 0.90),
)
WALL_COLOURS: tuple[tuple[float, float, float], ...] = (
    (0.66, 0.58, 0.50),
    (0.50, 0.60, 0.66),
    (0.56, 0.64, 0.50),
    (0.66, 0.52, 0.58),
    (0.56, 0.52, 0.68),
    (0.62, 0.62, 0.62),
)
FLOOR_COLOURS: tuple[tuple[float, float, float], ...] = (
    (0.42, 0.34, 0.28),
    (0.30, 0.34, 0.42),
    (0.30, 0.40, 0.32),
    (0.36, 0.36, 0.36),
)
FURNITURE_COLOURS: tuple[tuple[float, float, float], ...] = (
    (0.40, 0.22, 0.10),  # door
    (0.62, 0.82, 0.98),  # window
    (0.88, 0.55, 0.22),  # picture: frame
    (0.16, 0.26, 0.50),  # picture: canvas
    (1.00, 0.96, 0.72),  # lamp
    (0.78, 0.76, 0.70),  # pillars
)
DOOR, WINDOW, FRAME, CANVAS, LAMP, PILLAR = range(6)
WALL, FLOOR, TILE, CEILING, FIRST_BALL = range(6, 11)
