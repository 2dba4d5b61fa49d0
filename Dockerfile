# One image for every role; docker-compose.yml names the command of each.
FROM python:3.12-slim
ENV PYTHONUNBUFFERED=1 COMPUTESHARE_HOME=/home/computeshare/home COMPUTESHARE_DATA=/home/computeshare/data
RUN useradd --create-home computeshare && pip install --no-cache-dir uv==0.13.9
WORKDIR /app
COPY requirements.lock pyproject.toml README.md LICENSE alembic.ini ./
RUN uv pip sync --system --no-cache --require-hashes requirements.lock
COPY computeshare computeshare
COPY api api
COPY migrations migrations
RUN uv pip install --system --no-cache --no-deps . \
    && mkdir -p $COMPUTESHARE_HOME $COMPUTESHARE_DATA && chown -R computeshare /home/computeshare
USER computeshare
