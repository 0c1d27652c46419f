//! Sends one FORWARD to a station and prints what comes back:
//! `cargo run --example one_request -- uds:/run/aeon/flow.sock 1,2,3`

use aeon_proto::{residual, route::Route};
use aeon_station::client::{Client, ClientOptions, StationAddress};

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let (Some(station), Some(ids)) = (arguments.next(), arguments.next()) else {
        anyhow::bail!("two arguments expected: a station such as uds:PATH, and token ids such as 1,2,3");
    };
    let station: StationAddress = station.parse()?;
    let ids = ids.split(',').map(str::parse).collect::<Result<Vec<u32>, _>>()?;
    let mut body = Vec::new();
    residual::encode_u32s(&ids, &mut body);
    let client = Client::connect(&station, ClientOptions::default()).await?;
    let meta = |meta: &mut aeon_proto::payload::MetaWriter<'_, '_>| {
        meta.string("in", "ids");
    };
    let reply = client.request(Route::FORWARD, meta, &body).await?;
    println!("{}", reply.meta);
    println!("{} bytes of residual", reply.body.len());
    Ok(())
}
