create table charge (
    order_id text primary key,
    cents integer not null,
    receipt text not null
);
